#include <algorithm>

#include "bench/gpu/gpu_benches.h"
#include "bench/gpu_bench_model.h"
#include "gpu_kernels/products/products.h"
#include "loader/gpu_model.h"
#include "model/cost.h"
#include "with_gpu/cublas.h"
#include "with_gpu/random_on_gpu.h"

namespace tandem {
namespace {

using Kind = ManyRowsProduct::Kind;

// Random operands of one product; unused buffers stay empty.
class Operands {
 public:
  Operands(const ManyRowsProduct& p, int n, Number type, const ModelConfig& config,
           int n_multiprocessors, gpu::Stream& stream);
  static int64_t bytes_for(const ManyRowsProduct& p, int n, Number type);

  void multiply(gpu::Stream& stream);
  // With cuBLAS, for BF16 weights: one expert after another, or all in one call.
  void multiply(Cublas& blas);
  void multiply_grouped(Cublas& blas) { blas.multiply(*grouped_); }

 private:
  gpu::Buffer random(int64_t bytes, Number type) {
    gpu::Buffer buffer(bytes, gpu::Site::kDevice);
    fill_with_random(stream_, type, buffer);
    return buffer;
  }
  gpu::Weight weight(int64_t first_row) const;
  gpu::ExpertWeights experts(int64_t first_row) const;
  BlasProduct blas_product(int expert) const;

  const ManyRowsProduct p_;
  const int n_, n_multiprocessors_;
  const Number type_;
  const int block_;
  const int64_t stride_, out_cols_, rows_of_x_;
  gpu::Stream& stream_;
  gpu::Buffer x_, w_, scales_, out_, partial_, counters_, offsets_, tokens_;
  std::optional<BlasProducts> grouped_;
};

// Rows of one expert's matrix; gate and up are adjacent and form one matrix for cuBLAS.
int64_t matrix_rows(const ManyRowsProduct& p) {
  return p.kind == Kind::kGateUp ? 2 * p.rows : p.rows;
}
int64_t rows_of_x(const ManyRowsProduct& p, int n) {
  return int64_t{n} * (p.kind == Kind::kDown ? p.n_experts : 1);
}
int64_t out_bytes(const ManyRowsProduct& p, int n) {
  return int64_t{n} * p.n_experts * gpu::product_stride(matrix_rows(p)) * int64_t{sizeof(float)};
}

int64_t Operands::bytes_for(const ManyRowsProduct& p, int n, Number type) {
  const int64_t cols = gpu::product_stride(p.cols);
  return p.n_experts * matrix_rows(p) * cols * bytes_of(type) +
         rows_of_x(p, n) * cols * int64_t{sizeof(bf16)} + out_bytes(p, n);
}

Operands::Operands(const ManyRowsProduct& p, int n, Number type, const ModelConfig& config,
                   int n_multiprocessors, gpu::Stream& stream)
    : p_(p),
      n_(n),
      n_multiprocessors_(n_multiprocessors),
      type_(type),
      block_(scale_block_of(config)),
      stride_(gpu::product_stride(p.cols)),
      out_cols_(gpu::product_stride(matrix_rows(p))),
      rows_of_x_(rows_of_x(p, n)),
      stream_(stream) {
  x_ = random(rows_of_x_ * stride_ * int64_t{sizeof(bf16)}, Number::kBF16);
  w_ = random(p.n_experts * matrix_rows(p) * stride_ * bytes_of(type), type);
  out_ = gpu::Buffer(out_bytes(p, n), gpu::Site::kDevice);
  if (type == Number::kF8E4M3)
    scales_ = random((p.n_experts * matrix_rows(p) / block_ + 1) * (stride_ / block_ + 1) *
                         int64_t{sizeof(float)},
                     Number::kF32);
  const auto upload = [&](const auto& values) {
    gpu::Buffer buffer(std::ssize(values) * 4, gpu::Site::kDevice);
    stream.copy(values.data(), buffer.bytes(), buffer.as<void>());
    stream.wait();
    return buffer;
  };
  if (p.kind == Kind::kDense) {
    partial_ =
        gpu::Buffer(gpu::matrix_partials(weight(0), n, n_multiprocessors) * int64_t{sizeof(float)},
                    gpu::Site::kDevice);
    counters_ = upload(std::vector<uint32_t>(gpu::kCounters));
    return;
  }
  std::vector<int32_t> offsets(p.n_experts + 1), tokens(int64_t{n} * p.n_experts);
  for (int e = 0; e <= p.n_experts; ++e) offsets[e] = e * n;
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i % n);
  offsets_ = upload(offsets);
  tokens_ = upload(tokens);
  std::vector<BlasProduct> products;
  for (int e = 0; e < p.n_experts; ++e) products.push_back(blas_product(e));
  grouped_.emplace(products, stream);
}

// Experts share the scales: their values do not matter for the time.
gpu::Weight Operands::weight(int64_t first_row) const {
  return {.data = w_.as<std::byte>() + first_row * stride_ * bytes_of(type_),
          .stride = stride_,
          .type = type_,
          .rows = p_.rows,
          .cols = p_.cols,
          .scale = scales_.as<float>(),
          .scale_stride = stride_ / block_ + 1,
          .block_rows = block_,
          .block_cols = block_};
}

gpu::ExpertWeights Operands::experts(int64_t first_row) const {
  return {.first = weight(first_row),
          .weight_stride = matrix_rows(p_) * stride_ * bytes_of(type_),
          .scale_stride = 0};
}

void Operands::multiply(gpu::Stream& stream) {
  const gpu::ExpertRows rows = {
      .offsets = offsets_.as<int32_t>(), .n_experts = p_.n_experts, .max_rows = n_ * p_.n_experts};
  switch (p_.kind) {
    case Kind::kDense:
      return gpu::matrix_product(stream,
                                 {.x = x_.as<bf16>(),
                                  .w = weight(0),
                                  .out = out_.as<float>(),
                                  .x_stride = stride_,
                                  .out_stride = out_cols_,
                                  .n_tokens = n_,
                                  .workspace = {partial_.as<float>(), counters_.as<uint32_t>()},
                                  .n_multiprocessors = n_multiprocessors_});
    case Kind::kGateUp:
      return gpu::grouped_gate_up(stream, {.x = x_.as<bf16>(),
                                           .tokens = tokens_.as<int32_t>(),
                                           .rows = rows,
                                           .gate = experts(0),
                                           .up = experts(p_.rows),
                                           .hidden = out_.as<bf16>(),
                                           .x_stride = stride_,
                                           .hidden_stride = gpu::product_stride(p_.rows)});
    case Kind::kDown:
      return gpu::grouped_down(stream, {.hidden = x_.as<bf16>(),
                                        .rows = rows,
                                        .down = experts(0),
                                        .out = out_.as<float>(),
                                        .hidden_stride = stride_,
                                        .out_stride = out_cols_});
  }
}

void Operands::multiply(Cublas& blas) {
  for (int e = 0; e < p_.n_experts; ++e) blas.multiply(blas_product(e));
}

BlasProduct Operands::blas_product(int expert) const {
  const int64_t rows = matrix_rows(p_), e = expert;
  return {.x = x_.as<bf16>() + (p_.kind == Kind::kDown ? e * n_ * stride_ : 0),
          .w = w_.as<bf16>() + e * rows * stride_,
          .out = out_.as<bf16>() + e * n_ * out_cols_,
          .x_stride = stride_,
          .w_stride = stride_,
          .out_stride = out_cols_,
          .n = n_,
          .rows = static_cast<int>(rows),
          .cols = p_.cols};
}

class ProductsOnGpu {
 public:
  ProductsOnGpu(const ModelConfig& config, Number type, std::string& cublas,
                std::span<const char* const> libraries)
      : config_(config), type_(type) {
    if (libraries.empty() && !gpu_info_.emulated) libraries = Cublas::usual_names();
    blas_ = Cublas::open(libraries, stream_.handle(), cublas);
    if (blas_) cublas = fmt::format("{}", blas_->version());
    why_not_grouped_ = cublas;
    if (blas_) why_not_grouped_ = blas_->has_groups() ? "" : fmt::format("not in {}", cublas);
  }

  ProductTimes times(const ManyRowsProduct& p, int n, double seconds) {
    const auto timed = [&](Number type, const auto& multiply) -> std::optional<double> {
      if (Operands::bytes_for(p, n, type) > gpu_info_.free_bytes * 3 / 4) return {};
      Operands operands(p, n, type, config_, gpu_info_.n_multiprocessors, stream_);
      return seconds_of_runs([&](int64_t) { multiply(operands); }, [&] { stream_.wait(); },
                             seconds);
    };
    ProductTimes times;
    times.ours = timed(type_, [&](Operands& o) { o.multiply(stream_); });
    if (blas_)
      times.cublas = timed(Number::kBF16, [&](Operands& o) { call([&] { o.multiply(*blas_); }); });
    if (p.kind == Kind::kDense) return times;
    times.why_not_grouped = why_not_grouped_;
    if (why_not_grouped_.empty())
      times.cublas_grouped =
          timed(Number::kBF16, [&](Operands& o) { call([&] { o.multiply_grouped(*blas_); }); });
    return times;
  }

 private:
  // Memory of the emulated GPU can only be accessed while its stream works.
  void call(const std::function<void()>& library) {
    stream_.handle() ? library() : stream_.run_on_host(library);
  }

  const ModelConfig config_;
  const Number type_;
  const gpu::GpuInfo gpu_info_ = gpu::open_gpu();
  gpu::Stream stream_;
  std::unique_ptr<Cublas> blas_;
  std::string why_not_grouped_;  // empty: all experts in one call are compared
};

}  // namespace

ProductTimer product_timer(const ModelConfig& config, WeightFormat format, std::string& cublas,
                           std::span<const char* const> libraries) {
  require(format.dtype == DType::kBF16 || format.dtype == DType::kF8E4M3,
          "--format {}: GPU products of many rows support fp8 and bf16", format_name(format));
  if (!why_no_gpu().empty()) return {};
  const Number type = format.dtype == DType::kBF16 ? Number::kBF16 : Number::kF8E4M3;
  const auto products = std::make_shared<ProductsOnGpu>(config, type, cublas, libraries);
  return [products](const ManyRowsProduct& p, int n, double seconds) {
    return products->times(p, n, seconds);
  };
}

}  // namespace tandem
