// An open model of the library: tokenizer, chat template and an engine on a thread of its own.
#pragma once
#include <future>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "include/tandem.h"
#include "loader/engine_thread.h"
#include "text/chat_format.h"

namespace tandem {

class ApiModel {
 public:
  // Returns when the model is ready. Throws what loading throws.
  ApiModel(const std::string& directory, const tandem_options& options);

  // Answers all requests. Calls the hooks on this thread. Throws Error for an invalid request,
  // before anything is computed, and what an answer fails with.
  void generate(std::span<const tandem_request> requests, const tandem_hooks& hooks);
  std::vector<int32_t> prompt(const tandem_request& request) const;
  const std::string& description() const { return description_; }

 private:
  const Tokenizer tokenizer_;
  const std::unique_ptr<ChatFormat> chat_;  // null: the model has no template
  std::string description_;
  Engine* engine_ = nullptr;
  std::promise<void> opened_;
  std::unique_ptr<EngineThread> thread_;  // the last member: it uses the others
};

}  // namespace tandem
