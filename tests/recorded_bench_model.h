// A GPU of benchmarks that computes nothing and records what it is asked for, as lines of text; and
// kernels of the CPU that record their calls.
#pragma once
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "bench/benchmark.h"

namespace tandem {

// Calls with the shapes and places of their matrices: "#2+64[5,256]" is 64 bytes into the second
// allocation. A section ends after the first two runs; the number of all waits follows.
class CallLog {
 public:
  std::vector<std::string> lines;
  int runs_of_section = 2;
  int kernels_of_section = 12;

  void add(std::string line) {
    if (n_runs_ < runs_of_section) lines.push_back(std::move(line));
  }
  void begin_section(std::string line) {
    lines.push_back(fmt::format("{} waits", n_waits_));
    n_runs_ = n_waits_ = 0;
    kernels_.clear();
    lines.push_back(std::move(line));
  }
  // The first different calls of a section.
  void add_kernel(const std::string& line) {
    if (std::ssize(kernels_) < kernels_of_section && kernels_.insert(line).second)
      lines.push_back("cpu " + line);
  }
  // The address of something that lives as long as the benchmark, as a number.
  int number_of(const void* address) {
    return numbers_.try_emplace(address, static_cast<int>(numbers_.size())).first->second;
  }
  // A run ends with a wait, and so do copies.
  void wait() {
    ++n_waits_;
    add("wait");
    const bool of_copies = lines.size() > 1 && lines[lines.size() - 2].starts_with("to_gpu");
    if (!of_copies) ++n_runs_;
  }
  // Memory that lives as long as the log, so that every place has one name.
  Buffer allocate(int64_t bytes) {
    const auto& owner = allocations_.emplace_back(std::make_shared<Buffer>(bytes));
    add(fmt::format("allocate #{}: {} bytes", allocations_.size(), bytes));
    return {owner->span(), owner};
  }
  // Gives each wanted tensor a place of its own, which is not read.
  void name_weights(ModelWeights& weights, const GpuBenchOptions& options) {
    weights_.push_back(std::make_unique<Names>());
    Names& own = *weights_.back();
    const auto each = [&](auto visit) {
      for_each_weight(weights, options.config, [&](const WeightSpec& spec, QuantView& slot) {
        if (options.wanted(spec)) visit(spec, slot);
      });
    };
    each([&](const WeightSpec& spec, QuantView&) { own.names.push_back(spec.name); });
    own.places.resize(own.names.size());
    int64_t i = 0;
    each([&](const WeightSpec& spec, QuantView& slot) {
      slot.q = {own.places.data() + i++, spec.rows, spec.cols, spec.cols, DType::kBF16};
    });
  }

  std::string of(const TensorView& m) const {
    std::string text = place_of(m.data) + fmt::format("[{},{}", m.rows, m.cols);
    if (m.stride != m.cols) text += fmt::format("/{}", m.stride);
    return text + "]" + (m.dtype == DType::kF32 ? "" : std::string(name_of(m.dtype)));
  }
  std::string of(const QuantView& w) const {
    for (const auto& model : weights_)
      for (size_t i = 0; i < model->names.size(); ++i)
        if (w.q.data == &model->places[i]) return model->names[i];
    return of(w.q);
  }
  static std::string of(std::span<const int32_t> numbers) {
    return fmt::format("({})", fmt::join(numbers.begin(), numbers.end(), " "));
  }
  static std::string of(const Sequence& s) {
    return fmt::format("{{{} {} {} {}}}", s.first_token, s.n_tokens, s.kv_length, of(s.kv_pages));
  }

 private:
  struct Names {
    std::vector<std::string> names;
    std::vector<std::byte> places;
  };
  std::string place_of(const void* data) const {
    if (!data) return "null";
    for (size_t i = 0; i < allocations_.size(); ++i) {
      const int64_t at = static_cast<const std::byte*>(data) - allocations_[i]->data();
      if (at >= 0 && at < allocations_[i]->bytes())
        return fmt::format("#{}", i + 1) + (at == 0 ? "" : fmt::format("+{}", at));
    }
    return "host";
  }

  int n_runs_ = 0, n_waits_ = 0;
  std::set<std::string> kernels_;
  std::map<const void*, int> numbers_;
  std::vector<std::shared_ptr<Buffer>> allocations_;
  std::vector<std::unique_ptr<Names>> weights_;
};

// The reference kernels with their calls recorded: shapes, and the places of weights and of stored
// rows, numbered as they are first seen.
class RecordedKernels {
 public:
  explicit RecordedKernels(CallLog& log) { log_ = &log; }

  static cpu::KernelTable table() {
    cpu::KernelTable kernels = good();
    kernels.gemm = [](const cpu::GemmArgs& a) {
      log_->add_kernel("gemm " + product(a));
      good().gemm(a);
    };
    kernels.gemm_transposed = [](const cpu::GemmArgs& a) {
      log_->add_kernel("gemm_transposed " + product(a));
      good().gemm_transposed(a);
    };
    kernels.attend = [](const cpu::AttendArgs& a) {
      std::string keys;
      for (int i = 0; i < a.n_blocks; ++i)
        keys += fmt::format(" {}/{}", a.blocks[i].n_keys, a.blocks[i].visible);
      log_->add_kernel(fmt::format("attend {} queries of {}+{} and {}, from {}, {} a token, keys{}",
                                   a.n_queries, a.dim, a.rope_dim, a.v_dim, a.first_query,
                                   a.queries_per_token, keys));
      good().attend(a);
    };
    kernels.silu_mul = [](const cpu::SiluMulArgs& a) {
      log_->add_kernel(fmt::format("silu_mul {}", a.n));
      good().silu_mul(a);
    };
    kernels.decode = [](const cpu::DecodeArgs& a) {
      log_->add_kernel(fmt::format("decode {} of #{}", a.n, log_->number_of(a.from)));
      good().decode(a);
    };
    return kernels;
  }

 private:
  static const cpu::KernelTable& good() {
    static const cpu::KernelTable kernels = cpu::kernels_for(cpu::Isa::kReference);
    return kernels;
  }
  static std::string product(const cpu::GemmArgs& a) {
    return fmt::format("{}x{}x{} by #{} from {}", a.m, a.n, a.k, log_->number_of(a.w.data),
                       a.first_row);
  }

  static inline CallLog* log_ = nullptr;
};

class RecordedDevice final : public Device {
 public:
  explicit RecordedDevice(CallLog& log) : log_(log) {}
  Buffer allocate(int64_t bytes) override { return log_.allocate(bytes); }
  Buffer allocate_on_host(int64_t bytes) override { return log_.allocate(bytes); }
  void copy(const void* from, int64_t bytes, void* to) override {
    log_.add(fmt::format("copy {} to {}", log_.of(TensorView{const_cast<void*>(from), 1, bytes}),
                         log_.of(TensorView{to, 1, bytes})));
  }
  void wait() override { log_.wait(); }
  void to_host(TensorView x, TensorView out) override {
    for (int64_t r = 0; r < x.rows; ++r) std::memset(out.row_data(r), 0, out.cols * 4);
  }

 private:
  CallLog& log_;
};

class RecordedOps final : public Ops {
 public:
  explicit RecordedOps(CallLog& log) : log_(log) {}
  void begin(const Batch& b) override {
    std::string text = "begin " + CallLog::of(b.tokens) + " at " + CallLog::of(b.positions);
    for (const Sequence& s : b.sequences) text += " " + CallLog::of(s);
    log_.add(text);
  }
  void embed(std::span<const int32_t> tokens, const QuantView& table, TensorView out) override {
    add("embed " + CallLog::of(tokens), table, out);
  }
  void rms_norm(TensorView x, const QuantView& gain, float, TensorView out) override {
    add("rms_norm", x, gain, out);
  }
  void add(TensorView x, TensorView delta) override { add("add", x, delta); }
  void clear(TensorView x) override { add("clear", x); }
  void linear(TensorView x, const QuantView& w, TensorView out) override {
    add("linear", x, w, out);
  }
  void linear_per_head(const LinearPerHead& a) override {
    add(fmt::format("linear_per_head {} from {} by {}{}", a.n_heads, a.first_row, a.rows_per_head,
                    a.transposed ? " transposed" : ""),
        a.x, a.w, a.out);
  }
  void rope(TensorView x, std::span<const int32_t> positions, const RopeTable&) override {
    add("rope at " + CallLog::of(positions), x);
  }
  void append_kv(const Batch& batch, TensorView kv, TensorView cache) override {
    add("append_kv " + CallLog::of(batch.sequences[0]), kv, cache);
  }
  void mla_absorbed(const MlaArgs& a) override { attend("mla_absorbed", a); }
  void mla_naive(const MlaArgs& a, const QuantView& kv_b) override {
    attend("mla_naive " + log_.of(kv_b), a);
  }
  void silu_mul(TensorView gate, TensorView up) override { add("silu_mul", gate, up); }
  void route(const RouteArgs& a) override {
    add("route", a.x, a.w, a.bias, a.logits, a.out.ids, a.out.weights);
  }
  void gather_rows(TensorView x, std::span<const int32_t> rows, TensorView out) override {
    add("gather_rows " + CallLog::of(rows), x, out);
  }

 private:
  void add(std::string line, const auto&... matrices) {
    ((line += " " + log_.of(matrices)), ...);
    log_.add(std::move(line));
  }
  void attend(std::string name, const MlaArgs& a) {
    for (const Sequence& s : a.sequences) name += " " + CallLog::of(s);
    add(fmt::format("{} scale {:.4f}", name, a.softmax_scale), a.q, a.q_rope, a.cache, a.out);
  }

  CallLog& log_;
};

class RecordedExperts final : public ExpertPool {
 public:
  explicit RecordedExperts(CallLog& log) : log_(log) {}
  void add_to(Ticket ticket, TensorView y) override {
    log_.add(fmt::format("add ticket {} to ", ticket) + log_.of(y));
  }

 private:
  Ticket start(const ExpertBatch& b) override {
    log_.add(fmt::format("submit of layer {}: {} {} {}", b.layer, log_.of(b.x),
                         log_.of(b.routing.ids), log_.of(b.routing.weights)));
    return b.layer % kMaxTickets;
  }

  CallLog& log_;
};

// Experts that the CPU computes for the GPU model. Streams none, but counts 1,000 bytes a batch
// where steps have enough tokens.
class RecordedHybrid final : public HybridBenchModel {
 public:
  RecordedHybrid(ExpertPool& on_cpu, CallLog& log) : log_(log), experts_(*this, on_cpu) {}
  ExpertPool& experts() override { return experts_; }
  void micro_batches_from(int n_sequences) override {
    log_.add(fmt::format("micro-batches from {}", n_sequences));
  }
  std::optional<int> measure_crossover(int max_tokens) override {
    log_.add(fmt::format("crossover of {}", max_tokens));
    return crossover;
  }
  void stream_from(int n_tokens) override {
    log_.add(fmt::format("stream from {}", n_tokens));
    stream_from_ = n_tokens;
  }
  int64_t bytes_streamed() const override { return bytes_; }

  static inline std::optional<int> crossover = 77;

 private:
  class Experts final : public ExpertPool {
   public:
    Experts(RecordedHybrid& owner, ExpertPool& on_cpu) : owner_(owner), on_cpu_(on_cpu) {}
    void add_to(Ticket ticket, TensorView y) override { on_cpu_.add_to(ticket, y); }

   private:
    Ticket start(const ExpertBatch& b) override {
      owner_.log_.add(fmt::format("submit of layer {}: {} tokens", b.layer, b.x.rows));
      if (owner_.stream_from_ > 0 && b.x.rows >= owner_.stream_from_) owner_.bytes_ += 1000;
      ExpertBatch scaled = b;
      scales_.resize(b.x.rows);
      scaled.x_scales = scales_.data();
      return on_cpu_.submit(scaled);
    }
    RecordedHybrid& owner_;
    ExpertPool& on_cpu_;
    std::vector<float> scales_;
  };

  CallLog& log_;
  Experts experts_;
  int stream_from_ = 0;
  int64_t bytes_ = 0;
};

class RecordedBenchModel final : public GpuBenchModel {
 public:
  RecordedBenchModel(const GpuBenchOptions& o, CallLog& log)
      : log_(log), device_(log), ops_(log), experts_(log) {
    log.add(fmt::format("model of {} layers, {} dense, {} experts, {} and {}, {} tokens, ctx {}",
                        o.config.n_layers, o.config.n_dense_layers, o.config.router.n_experts,
                        format_name(o.formats.backbone), format_name(o.formats.experts),
                        o.max_tokens, o.context));
    log.name_weights(weights_, o);
  }
  const ModelWeights& weights() const override { return weights_; }
  Device& device() override { return device_; }
  Ops& ops() override { return ops_; }
  ExpertPool& experts() override { return experts_; }
  std::unique_ptr<HybridBenchModel> share(CpuExperts&, ExpertPool& on_cpu,
                                          int max_tokens) override {
    log_.add(fmt::format("share steps of {} tokens", max_tokens));
    return std::make_unique<RecordedHybrid>(on_cpu, log_);
  }
  QuantView repeated(TensorView rows, int64_t n_rows) override {
    log_.add(fmt::format("repeat {} to {} rows", log_.of(rows), n_rows));
    return {.q = {device_.allocate(1).data(), n_rows, rows.cols, rows.cols, rows.dtype},
            .scale = {}};
  }
  int n_nodes_of_last_step() const override { return 40; }
  int n_early_of_last_step() const override { return 30; }
  void to_gpu(TensorView from, TensorView to) override {
    log_.add("to_gpu " + log_.of(from) + " " + log_.of(to));
    std::memcpy(to.data, from.data, from.rows * from.row_bytes());
  }
  void wait() override { log_.wait(); }

 private:
  CallLog& log_;
  ModelWeights weights_;
  RecordedDevice device_;
  RecordedOps ops_;
  RecordedExperts experts_;
};

}  // namespace tandem
