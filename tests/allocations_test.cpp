// A step allocates no memory: everything is allocated at construction.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>

#include "tests/random_model.h"
#include "tests/small_config.h"
#include "tests/whole_models.h"
#include "tests/worker_threads.h"

namespace {
std::atomic<int64_t> n_allocations{0};
}  // namespace

extern "C" void* __libc_malloc(size_t);
extern "C" void* malloc(size_t n) {
  ++n_allocations;
  return __libc_malloc(n);
}

namespace tandem::test {
namespace {

// Tests a prefill step of the maximum length and decode steps.
TEST(Allocations, NothingIsAllocatedInAStep) {
  RandomModel random(small_config(), DType::kBF16);
  TestEngine engine(random, cpu::best_isa(), AttentionForm::kAuto, DType::kBF16, 0, 256);
  const std::vector<int32_t> prompt(256, 7), pages = {0, 1, 2, 3, 4};
  std::vector<int32_t> positions(256);
  for (int i = 0; i < 256; ++i) positions[i] = i;
  std::vector<float> logits(61);
  const TensorView out{logits.data(), 1, 61, 61, DType::kF32};
  const int32_t last_of_prompt = 255, first = 0, token = 5, position = 256;
  const Sequence prefill{0, 256, 256, pages}, decode{0, 1, 257, pages};
  engine.model.forward({prompt, positions, {&prefill, 1}, {&last_of_prompt, 1}}, engine.cache, out);

  const int64_t before = n_allocations;
  engine.model.forward({prompt, positions, {&prefill, 1}, {&last_of_prompt, 1}}, engine.cache, out);
  EXPECT_EQ(n_allocations - before, 0) << "in a prefill step";
  const int64_t between = n_allocations;
  for (int i = 0; i < 10; ++i)
    engine.model.forward({{&token, 1}, {&position, 1}, {&decode, 1}, {&first, 1}}, engine.cache,
                         out);
  EXPECT_EQ(n_allocations - between, 0) << "in decode steps";
  free(malloc(1));
  EXPECT_GT(n_allocations.load(), between) << "the counter counts";
}

// Neither the backbone nor the worker, which is a thread here, allocates for a request.
TEST(Allocations, NothingIsAllocatedWhereWorkersComputeExperts) {
  const std::string directory = kGolden + "v3_fp8";
  WorkerThread worker(served(directory, "2-7"));
  ModelOptions options = {.directory = directory, .n_threads = 1, .context = 512, .max_logits = 1};
  options.workers.addresses = {worker.address()};
  options.workers.deadline = std::chrono::seconds(60);  // no thread looks at the worker meanwhile
  LoadedModel loaded(options);
  const std::vector<int32_t> prompt(200, 7), pages = {0, 1, 2, 3, 4, 5, 6, 7};
  std::vector<int32_t> positions(200);
  for (int i = 0; i < 200; ++i) positions[i] = i;
  const int32_t last_of_prompt = 199, first = 0, token = 5, position = 200;
  const Sequence prefill{0, 200, 200, pages}, decode{0, 1, 201, pages};
  const auto step = [&] {
    loaded.model().forward({prompt, positions, {&prefill, 1}, {&last_of_prompt, 1}},
                           loaded.cache());
    loaded.model().forward({{&token, 1}, {&position, 1}, {&decode, 1}, {&first, 1}},
                           loaded.cache());
  };
  for (int i = 0; i < 3; ++i) step();
  const int64_t before = n_allocations;
  for (int i = 0; i < 100; ++i) step();
  EXPECT_EQ(n_allocations - before, 0);
}

}  // namespace
}  // namespace tandem::test
