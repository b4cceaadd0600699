// Implements runtime.h with CUDA: each function is one or two calls of the CUDA runtime.
#include "gpu_kernels/runtime.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

#include "gpu_kernels/cuda/probe.h"
#include "gpu_kernels/cuda/status.h"

namespace tandem::gpu {

struct Stream::Impl {
  cudaStream_t stream;
  bool after_kernel = false;  // the last work is a kernel, and nothing else precedes the next one
  cudaStream_t for_other_work() {
    after_kernel = false;
    return stream;
  }
  std::vector<std::unique_ptr<std::function<void()>>> captured;  // must live as long as the stream
};
struct Event::Impl {
  cudaEvent_t event;
  ~Impl() { cudaEventDestroy(event); }
};
struct Graph::Impl {
  cudaGraphExec_t exec;
  size_t n_nodes = 0;
  int n_early = 0;
  int64_t bytes = 0;
  ~Impl() { cudaGraphExecDestroy(exec); }
};

namespace {

int64_t free_bytes() {
  size_t free = 0, total = 0;
  check_cuda(cudaMemGetInfo(&free, &total));
  return static_cast<int64_t>(free);
}

int n_programmatic_edges(cudaGraph_t graph) {
  size_t n = 0;
#if CUDART_VERSION >= 13000
  constexpr auto* get_edges = &cudaGraphGetEdges;
#else
  constexpr auto* get_edges = &cudaGraphGetEdges_v2;
#endif
  check_cuda(get_edges(graph, nullptr, nullptr, nullptr, &n));
  std::vector<cudaGraphNode_t> from(n), to(n);
  std::vector<cudaGraphEdgeData> edges(n);
  check_cuda(get_edges(graph, from.data(), to.data(), edges.data(), &n));
  return static_cast<int>(std::count_if(edges.begin(), edges.end(), [](const auto& edge) {
    return edge.type == cudaGraphDependencyTypeProgrammatic;
  }));
}

bool launches_early() {
  static const bool early = [] {
    int major = 0;
    check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    return early_launches(major);
  }();
  return early;
}

// Derives the kernels' state from the result of a call that loads them.
GpuFacts::Kernels kernels_after(cudaError_t status) {
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction ||
      status == cudaErrorInvalidKernelImage)
    return GpuFacts::Kernels::kForOthers;
  if (status == cudaErrorUnsupportedPtxVersion) return GpuFacts::Kernels::kPtxTooNew;
  check_cuda(status);
  return GpuFacts::Kernels::kThere;
}

// Queries CUDA up to the first problem. Sets the GPU for this process.
GpuFacts ask_cuda() {
  GpuFacts facts;
  facts.toolkit = CUDART_VERSION;
  if (cudaDriverGetVersion(&facts.driver) != cudaSuccess || facts.driver == 0) return facts;
  const cudaError_t status = cudaGetDeviceCount(&facts.n_gpus);
  if (status == cudaErrorInsufficientDriver) {
    facts.count = GpuFacts::Count::kDriverTooOld;
  } else if (status != cudaSuccess) {
    facts.count = GpuFacts::Count::kFailed;
    facts.count_error = cudaGetErrorString(status);
  } else if (memory_option() && *memory_option() <= 0) {
    facts.n_gpus = 0;
  }
  if (status != cudaSuccess || facts.n_gpus == 0) return facts;
  cudaDeviceProp p;
  check_cuda(cudaGetDeviceProperties(&p, 0));
  facts.name = p.name;
  for (const char byte : p.uuid.bytes)
    facts.id += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  facts.major = p.major;
  facts.minor = p.minor;
  if (!why_not(facts).empty()) return facts;
  facts.kernels = kernels_after(cudaSetDevice(0));
  cudaFuncAttributes attributes;
  if (why_not(facts).empty())
    facts.kernels = kernels_after(cudaFuncGetAttributes(&attributes, any_kernel()));
  if (why_not(facts).empty()) facts.compiled_for = attributes.ptxVersion;
  return facts;
}

}  // namespace

// Streams belong to a GPU and threads choose theirs, so a process sees no other GPU.
void choose_gpu(int index) {
  constexpr const char* kVisible = "CUDA_VISIBLE_DEVICES";
  const char* const visible = std::getenv(kVisible);
  const auto given = visible ? std::optional<std::string>(visible) : std::nullopt;
  setenv(kVisible, only_gpu(given, index).c_str(), 1);
}

GpuInfo open_gpu() {
  // Loads kernels eagerly: a lazy load at first launch waits for all running kernels, even a
  // polling one.
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  const GpuFacts facts = ask_cuda();
  const std::string problem = why_not(facts);
  require(problem.empty(), "{}", problem);
  const auto attribute = [](cudaDeviceAttr which) {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, which, 0));
    return value;
  };
  // The memory transfers twice a cycle.
  const double memory_kilohertz = attribute(cudaDevAttrMemoryClockRate);
  const double bits = attribute(cudaDevAttrGlobalMemoryBusWidth);
  const int n_multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
  size_t free = 0, total = 0;
  check_cuda(cudaMemGetInfo(&free, &total));
  const int64_t most = memory_option().value_or(std::numeric_limits<int64_t>::max());
  return {.name = facts.name,
          .id = facts.id,
          .major = facts.major,
          .minor = facts.minor,
          .fp8_mma = has_fp8_mma(facts),
          .n_multiprocessors = n_multiprocessors,
          .bytes_per_second = 2e3 * memory_kilohertz * bits / 8,
          .datasheet_bf16_ops_per_second = datasheet_bf16_ops_per_second(
              facts, n_multiprocessors, attribute(cudaDevAttrClockRate)),
          .memory_bytes = std::min(static_cast<int64_t>(total), most),
          .free_bytes = std::min(static_cast<int64_t>(free), most),
          .ends_long_kernels = attribute(cudaDevAttrKernelExecTimeout) != 0};
}

CudaVersions cuda_versions() {
  const GpuFacts facts = ask_cuda();
  return {facts.driver, facts.toolkit};
}

Buffer::Buffer(int64_t bytes, Site site) : bytes_(bytes), site_(site) {
  if (bytes == 0) return;
  const auto n = static_cast<size_t>(bytes);
  if (site == Site::kDevice) {
    const cudaError_t status = cudaMalloc(&data_, n);
    require(status != cudaErrorMemoryAllocation,
            "the GPU has no {:.2f} GB left: use a smaller --ctx, a smaller model or --device cpu",
            bytes * 1e-9);
    check_cuda(status);
    check_cuda(cudaMemset(data_, 0xff, n));
    check_cuda(cudaDeviceSynchronize());  // our streams do not wait for the default stream
  } else {
    check_cuda(cudaHostAlloc(&data_, n, cudaHostAllocMapped | cudaHostAllocPortable));
    std::memset(data_, 0xff, n);
  }
}

// Errors are ignored: they were reported before, and a lost GPU also refuses to free memory.
Buffer::~Buffer() {
  if (data_) site_ == Site::kDevice ? cudaFree(data_) : cudaFreeHost(data_);
}

Event::Event() : impl_(new Impl) {
  check_cuda(cudaEventCreateWithFlags(&impl_->event, cudaEventDisableTiming));
}
Event::Event(Event&&) noexcept = default;
Event& Event::operator=(Event&&) noexcept = default;
Event::~Event() = default;
void Event::wait() const { check_cuda(cudaEventSynchronize(impl_->event)); }

Stream::Stream() : impl_(new Impl) {
  check_cuda(cudaStreamCreateWithFlags(&impl_->stream, cudaStreamNonBlocking));
}
Stream::~Stream() {
  cudaStreamSynchronize(impl_->stream);
  cudaStreamDestroy(impl_->stream);
}

void Stream::copy(const void* from, int64_t bytes, void* to) {
  check_cuda(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault,
                             impl_->for_other_work()));
}

void Stream::run_on_host(std::function<void()> work) {
  using Work = std::function<void()>;
  const cudaStream_t stream = impl_->for_other_work();
  auto call = std::make_unique<Work>(std::move(work));
  if (is_recording()) {  // runs at every replay
    check_cuda(cudaLaunchHostFunc(
        stream, [](void* p) { (*static_cast<Work*>(p))(); }, call.get()));
    impl_->captured.push_back(std::move(call));
  } else {
    check_cuda(cudaLaunchHostFunc(
        stream, [](void* p) { (*std::unique_ptr<Work>(static_cast<Work*>(p)))(); },
        call.release()));
  }
}

void Stream::record(Event& event) {
  check_cuda(cudaEventRecord(event.impl().event, impl_->stream));
}
void Stream::wait_for(const Event& event) {
  check_cuda(cudaStreamWaitEvent(impl_->for_other_work(), event.impl().event, 0));
}
void Stream::wait() { check_cuda(cudaStreamSynchronize(impl_->stream)); }
void Stream::throw_if_failed() const {
  const cudaError_t status = cudaStreamQuery(impl_->stream);
  if (status != cudaErrorNotReady) check_cuda(status);
}

Graph Stream::capture(const std::function<void()>& work) {
  cudaGraph_t graph;
  auto result = std::make_shared<Graph::Impl>();
  check_cuda(cudaStreamBeginCapture(impl_->for_other_work(), cudaStreamCaptureModeThreadLocal));
  try {
    work();
  } catch (...) {  // for example when the GPU is lost: ends the stream's recording
    graph = nullptr;
    cudaStreamEndCapture(impl_->stream, &graph);
    if (graph) cudaGraphDestroy(graph);
    throw;
  }
  check_cuda(cudaStreamEndCapture(impl_->stream, &graph));
  check_cuda(cudaGraphGetNodes(graph, nullptr, &result->n_nodes));
  result->n_early = n_programmatic_edges(graph);
  const int64_t free_before = free_bytes();
  check_cuda(cudaGraphInstantiate(&result->exec, graph, 0));
  check_cuda(cudaGraphDestroy(graph));
  check_cuda(cudaGraphUpload(result->exec, impl_->stream));
  check_cuda(cudaStreamSynchronize(impl_->stream));
  result->bytes = std::max<int64_t>(free_before - free_bytes(), 0);
  return Graph(std::move(result));
}

int Graph::n_nodes() const { return static_cast<int>(impl_->n_nodes); }

int Graph::n_early() const { return impl_->n_early; }

int64_t Graph::bytes() const { return impl_->bytes; }

bool Stream::is_recording() const {
  cudaStreamCaptureStatus status;
  check_cuda(cudaStreamIsCapturing(impl_->stream, &status));
  return status == cudaStreamCaptureStatusActive;
}

void* Stream::handle() const { return impl_->for_other_work(); }

void Stream::replay(const Graph& graph) {
  check_cuda(cudaGraphLaunch(graph.impl().exec, impl_->for_other_work()));
}

void launch_kernel(const void* kernel, const LaunchShape& shape, const Stream& stream,
                   const void* args) {
  if (shape.shared_bytes > 48 * 1024)
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shape.shared_bytes)));
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(shape.grid_x), static_cast<unsigned>(shape.grid_y),
                        static_cast<unsigned>(shape.grid_z));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = stream.impl().stream;
  const bool after_kernel = std::exchange(stream.impl().after_kernel, !shape.co_resident);
  cudaLaunchAttribute attribute = {};
  config.attrs = &attribute;
  if (shape.co_resident) {
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
    config.numAttrs = 1;
  } else if (shape.early && after_kernel && launches_early()) {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.numAttrs = 1;
  }
  void* arguments[] = {const_cast<void*>(args)};
  check_cuda(cudaLaunchKernelExC(&config, kernel, arguments));
}

}  // namespace tandem::gpu
