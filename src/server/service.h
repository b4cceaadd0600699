// Answers requests, independent of the transport. Thread-safe.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <variant>

#include "http/request_handler.h"
#include "scheduling/expert_loads.h"
#include "server/answer_grammar.h"
#include "server/generation.h"
#include "text/chat_format.h"

namespace tandem {

class Service final : public RequestHandler {
 public:
  struct Options {
    std::string model_id;                        // id of the model in the API
    std::string root;                            // folder of the model
    std::string role = {};                       // prefill or decode; empty: a whole server
    std::string simulated_routing = {};          // its name; empty: the router chooses
    std::string api_key;                         // empty: no key is required
    std::vector<std::string> cors_origins = {};  // origins of pages that may read responses
    std::function<void(const std::string&)> log = [](const std::string&) {};  // a line per request
  };

  // The tokenizer must outlive the service. `chat` is null when the checkpoint has no template.
  Service(const Tokenizer& tokenizer, std::unique_ptr<ChatFormat> chat, SamplingDefaults defaults,
          Options options);

  // State of the server: loading, with the loaded fraction 0 .. 1; ready; stopping, when new
  // requests are refused. The engine must outlive all generations.
  void set_loading(double fraction) { loaded_fraction_ = fraction; }
  void set_ready(Engine& engine) { engine_ = &engine; }
  bool is_ready() const { return engine_ != nullptr; }
  void set_stopping() override { stopping_ = true; }

  Result handle(const HttpRequest& request) noexcept override;

  HttpResponse error_response(const ApiError& error) override;
  std::string cors(const HttpRequest& request) const override {
    return cors_headers(options_.cors_origins, request.cors);
  }
  void count_response(int status) override { metrics_.http_response(status); }

 private:
  Result route_or_error(const HttpRequest& request);
  Result route(const HttpRequest& request);
  Result get(const HttpRequest& request);
  Result post(const HttpRequest& request);
  HttpResponse metrics() const;
  HttpResponse experts();
  HttpResponse rebalance();
  HttpResponse rebalance_report();
  Engine& rebalancing_engine();
  HttpResponse models(const std::string& path);
  Engine& engine();
  std::shared_ptr<Generation> generation(GenerationRequest request);
  std::vector<std::vector<int32_t>> prompts_of(const GenerationRequest& request) const;
  std::vector<int32_t> text_prompt(const std::string& text, bool add_special_tokens) const;
  std::vector<int32_t> chat_prompt(const GenerationRequest& request) const;
  void require_context_fits(const GenerationRequest& request, size_t n_prompt) const;
  HttpResponse health() const;
  HttpResponse server_info() const;
  HttpResponse tokenize(const nlohmann::ordered_json& json) const;
  HttpResponse detokenize(const nlohmann::ordered_json& json) const;

  const Tokenizer& tokenizer_;
  const std::unique_ptr<ChatFormat> chat_;
  const SamplingDefaults defaults_;
  AnswerGrammars grammars_;
  const Options options_;
  const int64_t created_;
  Metrics metrics_;
  std::atomic<double> loaded_fraction_{0};
  std::atomic<Engine*> engine_{nullptr};
  std::atomic<bool> stopping_{false};
};

}  // namespace tandem
