// Answers requests, independent of the transport. Thread-safe.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <variant>

#include "server/answer_grammar.h"
#include "server/api_error.h"
#include "server/cors.h"
#include "server/generation.h"
#include "text/chat_format.h"

namespace tandem {

struct HttpRequest {
  std::string method, path;  // path: without the query
  std::string authorization;
  std::string body;
  PageOrigin page = {};
};

struct HttpReply {
  int status = 200;
  std::string body = {};
  const char* content_type = "application/json";
  int retry_after_seconds = 0;  // header Retry-After; 0: none
  std::string allow = {};       // header Allow of a reply 405; empty: none
};

class Service {
 public:
  struct Options {
    std::string model_id;                        // id of the model in the API
    std::string root;                            // folder of the model
    std::string api_key;                         // empty: no key is required
    std::vector<std::string> cors_origins = {};  // origins of pages that may read answers
    std::function<void(const std::string&)> log = [](const std::string&) {};  // a line per request
  };

  // The tokenizer must outlive the service. `chat` is null when the checkpoint has no template.
  Service(const Tokenizer& tokenizer, std::unique_ptr<ChatFormat> chat, SamplingDefaults defaults,
          Options options);

  // State of the server: loading, with the loaded fraction 0 .. 1; ready; stopping, when new
  // requests are refused. The engine must outlive all generations.
  void loading(double part) { loaded_part_ = part; }
  void ready(Engine& engine) { engine_ = &engine; }
  void stopping() { stopping_ = true; }

  using Answer = std::variant<HttpReply, std::shared_ptr<Generation>>;
  // Answers a request. The caller must start() a Generation.
  Answer handle(const HttpRequest& request) noexcept;

  HttpReply error_reply(const ApiError& error);
  // CORS header lines of every answer to this request.
  std::string cors(const HttpRequest& request) const {
    return cors_headers(options_.cors_origins, request.page);
  }
  // Counts an answer that is sent.
  void answered(int status) { metrics_.answered(status); }

 private:
  Answer answer_or_error(const HttpRequest& request);
  Answer route(const HttpRequest& request);
  Answer get(const HttpRequest& request);
  Answer post(const HttpRequest& request);
  HttpReply metrics() const;
  HttpReply models(const std::string& path);
  void require_key(const HttpRequest& request) const;
  Engine& engine();
  std::shared_ptr<Generation> generation(GenerationRequest request);
  std::vector<std::vector<int32_t>> prompts_of(const GenerationRequest& request) const;
  std::vector<int32_t> text_prompt(const std::string& text, bool add_special_tokens) const;
  std::vector<int32_t> chat_prompt(const GenerationRequest& request) const;
  void require_fits(const GenerationRequest& request, size_t n_prompt) const;
  HttpReply health() const;
  HttpReply server_info() const;
  HttpReply tokenize(const nlohmann::ordered_json& json) const;
  HttpReply detokenize(const nlohmann::ordered_json& json) const;

  const Tokenizer& tokenizer_;
  const std::unique_ptr<ChatFormat> chat_;
  const SamplingDefaults defaults_;
  AnswerGrammars grammars_;
  const Options options_;
  const int64_t created_;
  Metrics metrics_;
  std::atomic<double> loaded_part_{0};
  std::atomic<Engine*> engine_{nullptr};
  std::atomic<bool> stopping_{false};
};

}  // namespace tandem
