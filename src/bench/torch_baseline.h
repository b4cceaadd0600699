// The same shapes in PyTorch on this CPU, as a baseline beside our rows. PyTorch runs in a Python
// process of its own, which is asked for one row at a time, so that both see the same machine.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace tandem {

class TorchBaseline {
 public:
  // `seconds`: time to measure each row. Throws Error when python3 does not start or cannot import
  // torch.
  TorchBaseline(int n_threads, double seconds);
  TorchBaseline(const TorchBaseline&) = delete;
  ~TorchBaseline();

  // Median seconds of a run with BF16 weights, of which there are so many copies that they come
  // from memory. Throws std::runtime_error when PyTorch fails, for instance for lack of memory.
  double embed(int64_t vocab, int64_t dim, int n_tokens);  // rows of a table
  double linear(int64_t rows, int64_t cols, int n_tokens);
  double feed_forward(int64_t dim, int64_t width, int n_tokens);  // silu(x gate) * (x up), down

  const std::string& version() const { return version_; }

 private:
  nlohmann::json read();
  double ask(const nlohmann::json& request);
  void end();

  int to_ = -1, from_ = -1;  // pipes
  int pid_ = -1;
  std::string received_, version_;
};

}  // namespace tandem
