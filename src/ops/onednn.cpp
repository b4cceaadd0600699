// oneDNN's matrix product (oneDNN's developer guide, "Matrix Multiplication"), called for one piece
// of 64 outputs at a time by the team's own threads. A piece with interleaved panels is what oneDNN
// calls the layout BA16a64b2a (BF16) or BA16a64b (F32), which it prefers.
#include <dnnl.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <string_view>
#include <type_traits>

#include "core/memory.h"
#include "core/shared_library.h"
#include "ops/dense_products.h"

namespace tandem {
namespace {

// The numbers of rows for which there is a primitive, largest first; others are sums of these.
constexpr int kRowCounts[] = {256, 128, 64, 32, 16, 15, 14, 13, 12, 11,
                              10,  9,   8,  7,  6,  5,  4,  3,  2,  1};
constexpr int kMaxRows = kRowCounts[0];

// The functions of the library, of the version whose header is compiled.
struct Library {
  explicit Library(const SharedLibrary& opened) : library(opened) {
    find(version, "dnnl_version");
    find(engine_create, "dnnl_engine_create");
    find(engine_destroy, "dnnl_engine_destroy");
    find(stream_create, "dnnl_stream_create");
    find(stream_destroy, "dnnl_stream_destroy");
    find(attr_create, "dnnl_primitive_attr_create");
    find(attr_destroy, "dnnl_primitive_attr_destroy");
    find(attr_set_scratchpad_mode, "dnnl_primitive_attr_set_scratchpad_mode");
    find(desc_destroy, "dnnl_primitive_desc_destroy");
    find(desc_query, "dnnl_primitive_desc_query");
    find(desc_query_md, "dnnl_primitive_desc_query_md");
    find(md_get_size, "dnnl_memory_desc_get_size");
    find(primitive_create, "dnnl_primitive_create");
    find(primitive_destroy, "dnnl_primitive_destroy");
    find(execute, "dnnl_primitive_execute");
    find(memory_create, "dnnl_memory_create");
    find(memory_destroy, "dnnl_memory_destroy");
    find(memory_set_data_handle, "dnnl_memory_set_data_handle");
#if DNNL_VERSION_MAJOR >= 3
    find(md_create, "dnnl_memory_desc_create_with_tag");
    find(md_destroy, "dnnl_memory_desc_destroy");
    find(matmul_create, "dnnl_matmul_primitive_desc_create");
#else
    find(md_init, "dnnl_memory_desc_init_by_tag");
    find(matmul_init, "dnnl_matmul_desc_init");
    find(desc_create, "dnnl_primitive_desc_create");
#endif
  }
  template <class F>
  void find(F*& function, const char* name) {
    complete = library.find(function, name) && complete;
  }

  const SharedLibrary library;
  bool complete = true;
  decltype(&dnnl_version) version;
  decltype(&dnnl_engine_create) engine_create;
  decltype(&dnnl_engine_destroy) engine_destroy;
  decltype(&dnnl_stream_create) stream_create;
  decltype(&dnnl_stream_destroy) stream_destroy;
  decltype(&dnnl_primitive_attr_create) attr_create;
  decltype(&dnnl_primitive_attr_destroy) attr_destroy;
  decltype(&dnnl_primitive_attr_set_scratchpad_mode) attr_set_scratchpad_mode;
  decltype(&dnnl_primitive_desc_destroy) desc_destroy;
  decltype(&dnnl_primitive_desc_query) desc_query;
  decltype(&dnnl_primitive_desc_query_md) desc_query_md;
  decltype(&dnnl_memory_desc_get_size) md_get_size;
  decltype(&dnnl_primitive_create) primitive_create;
  decltype(&dnnl_primitive_destroy) primitive_destroy;
  decltype(&dnnl_primitive_execute) execute;
  decltype(&dnnl_memory_create) memory_create;
  decltype(&dnnl_memory_destroy) memory_destroy;
  decltype(&dnnl_memory_set_data_handle) memory_set_data_handle;

  // Product of x [n, cols] with the weights of a piece, [cols, kPieceRows] in oneDNN's terms.
  struct Matmul {
    int n_rows;
    int64_t cols;
    dnnl_data_type_t type;
    dnnl_format_tag_t layout;
  };
#if DNNL_VERSION_MAJOR >= 3
  decltype(&dnnl_memory_desc_create_with_tag) md_create;
  decltype(&dnnl_memory_desc_destroy) md_destroy;
  decltype(&dnnl_matmul_primitive_desc_create) matmul_create;
  dnnl_status_t describe(dnnl_primitive_desc_t* desc, const Matmul& m, dnnl_engine_t engine,
                         dnnl_primitive_attr_t attr) const {
    const dnnl_dims_t x_dims = {m.n_rows, m.cols}, w_dims = {m.cols, kPieceRows},
                      y_dims = {m.n_rows, kPieceRows};
    dnnl_memory_desc_t x = nullptr, w = nullptr, y = nullptr;
    md_create(&x, 2, x_dims, m.type, dnnl_ab);
    md_create(&w, 2, w_dims, m.type, m.layout);
    md_create(&y, 2, y_dims, dnnl_f32, dnnl_ab);
    const dnnl_status_t status = matmul_create(desc, engine, x, w, nullptr, y, attr);
    for (const dnnl_memory_desc_t md : {x, w, y}) md_destroy(md);
    return status;
  }
#else
  decltype(&dnnl_memory_desc_init_by_tag) md_init;
  decltype(&dnnl_matmul_desc_init) matmul_init;
  decltype(&dnnl_primitive_desc_create) desc_create;
  dnnl_status_t describe(dnnl_primitive_desc_t* desc, const Matmul& m, dnnl_engine_t engine,
                         dnnl_primitive_attr_t attr) const {
    const dnnl_dims_t x_dims = {m.n_rows, m.cols}, w_dims = {m.cols, kPieceRows},
                      y_dims = {m.n_rows, kPieceRows};
    dnnl_memory_desc_t x, w, y;
    md_init(&x, 2, x_dims, m.type, dnnl_ab);
    md_init(&w, 2, w_dims, m.type, m.layout);
    md_init(&y, 2, y_dims, dnnl_f32, dnnl_ab);
    dnnl_matmul_desc_t matmul;
    const dnnl_status_t status = matmul_init(&matmul, &x, &w, nullptr, &y);
    return status == dnnl_success ? desc_create(desc, &matmul, attr, engine, nullptr) : status;
  }
#endif
};

// An object of the library.
template <class T>
using Owned = std::unique_ptr<std::remove_pointer_t<T>, dnnl_status_t (*)(T)>;

// Threads of OpenMP would compete with the team for the cores. Primitives that this thread
// creates from here on compute on the thread that calls them. False for a library with another pool
// of threads.
bool use_calling_thread(const Library& library) {
  if (library.version()->cpu_runtime == DNNL_RUNTIME_SEQ) return true;
  void (*set_num_threads)(int);
  if (library.version()->cpu_runtime != DNNL_RUNTIME_OMP ||
      !library.library.find(set_num_threads, "omp_set_num_threads"))
    return false;
  set_num_threads(1);
  return true;
}

class OneDnn final : public ProductProvider {
 public:
  OneDnn(const Library& library, Owned<dnnl_engine_t> engine, int n_threads)
      : call_(library),
        engine_(std::move(engine)),
        attr_(nullptr, call_.attr_destroy),
        sums_(int64_t{n_threads} * kMaxRows * kPieceRows * static_cast<int64_t>(sizeof(float))) {
    dnnl_primitive_attr_t attr = nullptr;
    must(call_.attr_create(&attr), "dnnl_primitive_attr_create");
    attr_.reset(attr);
    must(call_.attr_set_scratchpad_mode(attr, dnnl_scratchpad_mode_user),
         "dnnl_primitive_attr_set_scratchpad_mode");
    for (int i = 0; i < n_threads; ++i) {
      dnnl_stream_t stream = nullptr;
      must(call_.stream_create(&stream, engine_.get(), dnnl_stream_default_flags),
           "dnnl_stream_create");
      streams_.emplace_back(stream, call_.stream_destroy);
    }
  }

  std::string name() const override {
    const dnnl_version_t* v = call_.version();
    return fmt::format("oneDNN {}.{}.{}", v->major, v->minor, v->patch);
  }

  bool prepare(DType weights, int64_t cols) override {
    if (weights != DType::kBF16 && weights != DType::kF32) return false;
    if (find(weights, cols)) return true;
    Prepared prepared = {weights, cols, {}};
    use_calling_thread(call_);
    for (const int n : kRowCounts)
      if (!add_primitive(prepared, n)) return false;
    prepared_.push_back(std::move(prepared));
    return true;
  }

  void multiply(const cpu::GemmArgs& a, int thread) override {
    const bool bf16 = a.w.type == cpu::WeightType::kBF16;
    const Prepared* prepared = find(bf16 ? DType::kBF16 : DType::kF32, a.k);
    check(prepared && a.n == kPieceRows && a.first_row % kPieceRows == 0, "an unprepared product");
    const std::byte* w =
        static_cast<const std::byte*>(a.w.data) + a.first_row / cpu::kPanelRows * a.w.stride;
    auto* const sums = reinterpret_cast<float*>(sums_.data()) + thread * kMaxRows * kPieceRows;
    size_t which = 0;
    for (int row = 0; row < a.m; row += kRowCounts[which]) {
      while (kRowCounts[which] > a.m - row) ++which;
      const std::byte* x = static_cast<const std::byte*>(a.x.data) + row * a.x.stride;
      execute(prepared->products[which], x, w, sums, thread);
      for (int i = 0; i < kRowCounts[which]; ++i)
        std::memcpy(a.out + (row + i) * a.out_stride, sums + i * kPieceRows,
                    kPieceRows * sizeof(float));
    }
  }

 private:
  // A thread's arguments of a primitive.
  struct Arguments {
    Owned<dnnl_memory_t> x, w, y, scratchpad;
    std::vector<std::byte> scratchpad_bytes;
  };
  struct Product {
    Owned<dnnl_primitive_t> primitive;
    std::vector<Arguments> of_thread;
  };
  struct Prepared {
    DType weights;
    int64_t cols;
    std::vector<Product> products;  // one for each of kRowCounts
  };

  static void must(dnnl_status_t status, const char* what) {
    require(status == dnnl_success, "oneDNN: {} fails with status {}", what,
            static_cast<int>(status));
  }

  const Prepared* find(DType weights, int64_t cols) const {
    for (const Prepared& p : prepared_)
      if (p.weights == weights && p.cols == cols) return &p;
    return nullptr;
  }

  // False where the library would use its reference implementation.
  bool add_primitive(Prepared& prepared, int n_rows) {
    const bool bf16 = prepared.weights == DType::kBF16;
    const Library::Matmul matmul = {n_rows, prepared.cols, bf16 ? dnnl_bf16 : dnnl_f32,
                                    bf16 ? dnnl_BA16a64b2a : dnnl_BA16a64b};
    dnnl_primitive_desc_t described = nullptr;
    if (call_.describe(&described, matmul, engine_.get(), attr_.get()) != dnnl_success)
      return false;
    const Owned<dnnl_primitive_desc_t> desc(described, call_.desc_destroy);
    const char* implementation = "ref";
    call_.desc_query(described, dnnl_query_impl_info_str, 0, static_cast<void*>(&implementation));
    if (std::string_view(implementation).starts_with("ref")) return false;
    dnnl_primitive_t primitive = nullptr;
    if (call_.primitive_create(&primitive, described) != dnnl_success) return false;

    Product product = {Owned<dnnl_primitive_t>(primitive, call_.primitive_destroy), {}};
    const auto md = [&](dnnl_query_t what) { return call_.desc_query_md(described, what, 0); };
    for (size_t i = 0; i < streams_.size(); ++i) {
      std::vector<std::byte> bytes(call_.md_get_size(md(dnnl_query_scratchpad_md)));
      auto scratchpad = memory(md(dnnl_query_scratchpad_md), bytes.data());
      product.of_thread.push_back({memory(md(dnnl_query_src_md)), memory(md(dnnl_query_weights_md)),
                                   memory(md(dnnl_query_dst_md)), std::move(scratchpad),
                                   std::move(bytes)});
    }
    prepared.products.push_back(std::move(product));
    return true;
  }

  template <class Description>
  Owned<dnnl_memory_t> memory(Description md, void* data = DNNL_MEMORY_NONE) const {
    dnnl_memory_t created = nullptr;
    must(call_.memory_create(&created, md, engine_.get(), data), "dnnl_memory_create");
    return {created, call_.memory_destroy};
  }

  void execute(const Product& product, const void* x, const void* w, float* y, int thread) const {
    const Arguments& of = product.of_thread[thread];
    call_.memory_set_data_handle(of.x.get(), const_cast<void*>(x));
    call_.memory_set_data_handle(of.w.get(), const_cast<void*>(w));
    call_.memory_set_data_handle(of.y.get(), y);
    const dnnl_exec_arg_t args[] = {{DNNL_ARG_SRC, of.x.get()},
                                    {DNNL_ARG_WEIGHTS, of.w.get()},
                                    {DNNL_ARG_DST, of.y.get()},
                                    {DNNL_ARG_SCRATCHPAD, of.scratchpad.get()}};
    const dnnl_status_t status =
        call_.execute(product.primitive.get(), streams_[thread].get(), std::size(args), args);
    check(status == dnnl_success, "oneDNN refuses a product that it prepared");
  }

  const Library call_;
  const Owned<dnnl_engine_t> engine_;
  Owned<dnnl_primitive_attr_t> attr_;
  std::vector<Owned<dnnl_stream_t>> streams_;  // one for each thread
  std::vector<Prepared> prepared_;
  Buffer sums_;  // [threads * kMaxRows, kPieceRows] floats: oneDNN writes rows side by side
};

}  // namespace

std::span<const char* const> onednn_names() {
  static constexpr const char* kNames[] = {DNNL_VERSION_MAJOR >= 3 ? "libdnnl.so.3"
                                                                   : "libdnnl.so.2"};
  return kNames;
}

std::unique_ptr<ProductProvider> open_onednn(std::span<const char* const> names, int n_threads,
                                             std::string& why_not) {
  const SharedLibrary opened(names);
  why_not = fmt::format("oneDNN is not installed ({})", fmt::join(names, ", "));
  if (!opened) return nullptr;
  const Library library(opened);
  why_not = fmt::format("not the functions of oneDNN {}", DNNL_VERSION_MAJOR);
  if (!library.complete) return nullptr;
  why_not = "oneDNN was built with threads other than those of OpenMP";
  if (!use_calling_thread(library)) return nullptr;
  dnnl_engine_t engine = nullptr;
  const dnnl_status_t status = library.engine_create(&engine, dnnl_cpu, 0);
  why_not = fmt::format("oneDNN does not start (status {})", static_cast<int>(status));
  if (status != dnnl_success) return nullptr;
  why_not.clear();
  return std::make_unique<OneDnn>(library, Owned<dnnl_engine_t>(engine, library.engine_destroy),
                                  n_threads);
}

}  // namespace tandem
