// The conversation with PyTorch's process, with a module named torch that computes nothing.
#include "bench/torch_baseline.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

#include "bench/benchmark.h"
#include "tests/error_of.h"
#include "tests/temp_directory.h"

namespace tandem {
namespace {

// Sleeps where a product would be computed: 1 ms for each 1,000 numbers of its result.
constexpr const char* kTorch = R"python(
import time
__version__ = "0.0-made-up"
bfloat16 = object()
class Matrix:
    def __init__(self, shape): self.shape = shape
    def to(self, _): return self
    def clone(self): return self
    def __mul__(self, _): return self
def randn(shape): return Matrix(tuple(shape))
def randint(low, high, shape): return Matrix(tuple(shape))
def set_num_threads(n):
    if n not in (1, 3): raise SystemExit("threads")
def set_grad_enabled(on): pass
)python";
constexpr const char* kFunctional = R"python(
import time
from torch import Matrix
def made(*shape):
    n = 1
    for extent in shape: n *= extent
    time.sleep(n * 1e-6)
    return Matrix(shape)
def embedding(ids, table): return made(ids.shape[0], table.shape[1])
def linear(x, w):
    if x.shape[1] != w.shape[1]: raise ValueError("shapes")
    return made(x.shape[0], w.shape[0])
def silu(x): return x
)python";

class MadeUpTorch : public testing::Test {
 protected:
  MadeUpTorch() {
    std::filesystem::create_directories(dir_.file("torch/nn"));
    dir_.write("torch/__init__.py", kTorch);
    dir_.write("torch/nn/__init__.py", "");
    dir_.write("torch/nn/functional.py", kFunctional);
    setenv("PYTHONPATH", dir_.path().c_str(), 1);
  }
  ~MadeUpTorch() override { unsetenv("PYTHONPATH"); }
  TempDirectory dir_;
};

TEST_F(MadeUpTorch, TimesTheShapesThatAreAskedFor) {
  TorchBaseline torch(3, 0.001);
  EXPECT_EQ(torch.version(), "0.0-made-up");
  const auto within = [](double seconds, double least) {
    EXPECT_GE(seconds, least);
    EXPECT_LT(seconds, least + 0.1);
  };
  within(torch.embed(100'000, 1000, 5), 0.005);
  within(torch.linear(4000, 100, 2), 0.008);
  within(torch.feed_forward(1000, 4000, 2), 0.018);  // twice 4,000 and once 1,000 columns
}

TEST_F(MadeUpTorch, ARowHasItsColumn) {
  BenchInput bench{.options = {.tokens = {2}, .seconds = 0.001, .baseline = "torch"}};
  bench.config.dim = 512;
  bench.config.vocab = 1000;
  bench.memory_bytes = int64_t{1} << 30;
  Team team(1);
  MachineSpeed speed(team, 1 << 20);
  int n_rows = 0;
  embed_benchmark().on_cpu(bench, cpu::kernels_for(cpu::Isa::kReference), speed,
                           [&](const nlohmann::ordered_json& row) {
                             ++n_rows;
                             EXPECT_GE(row.at("torch_seconds").get<double>(), 0.001024);
                             EXPECT_EQ(row.at("torch_version"), "0.0-made-up");
                             EXPECT_NE(row_header(row).find("PyTorch BF16 ms"), std::string::npos);
                           });
  EXPECT_EQ(n_rows, 1);
}

TEST_F(MadeUpTorch, FailuresAreSaid) {
  dir_.write("torch/nn/functional.py", "def linear(x, w): raise MemoryError('full')\n");
  TorchBaseline torch(3, 0.001);
  EXPECT_THROW(
      {
        try {
          torch.linear(1000, 1000, 1);
        } catch (const std::runtime_error& error) {
          EXPECT_STREQ(error.what(), "--baseline torch: PyTorch fails: MemoryError: full");
          throw;
        }
      },
      std::runtime_error);
}

TEST_F(MadeUpTorch, WithoutTorchOrPythonThereIsOneError) {
  dir_.write("torch/__init__.py", "raise ImportError('no such thing')\n");
  EXPECT_EQ(error_of([] { TorchBaseline(3, 0.001); }),
            "--baseline torch: python3 cannot import torch (no such thing)");
  dir_.write("torch/__init__.py", "raise SystemExit(1)\n");
  EXPECT_EQ(error_of([] { TorchBaseline(3, 0.001); }),
            "--baseline torch: python3 cannot import torch (it ended)");
  const std::string path = std::getenv("PATH");
  setenv("PATH", dir_.path().c_str(), 1);
  EXPECT_EQ(error_of([] { TorchBaseline(3, 0.001); }),
            "--baseline torch: python3 does not start: No such file or directory");
  setenv("PATH", path.c_str(), 1);
}

}  // namespace
}  // namespace tandem
