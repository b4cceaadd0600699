// An engine of the embedded model on a thread of its own, as in the server, and requests whose
// answers are text.
#pragma once
#include <gtest/gtest.h>

#include <future>
#include <utility>

#include "cli/conversation.h"
#include "cli/options.h"
#include "engine/completion.h"
#include "engine/engine.h"
#include "loader/loaded_model.h"
#include "scheduling/answer_stream.h"
#include "tests/repository.h"
#include "text/chat_format.h"

namespace tandem::test {

struct Ending {
  std::string text;
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
  std::vector<ScoredToken> prompt;
  int cached_tokens = 0;
  FinishReason finish;
  std::string error;
};

inline const Tokenizer& tokenizer() {
  static const Tokenizer tokenizer = Tokenizer::from_directory(kTinyR1);
  return tokenizer;
}

// A request that receives its answer as text.
struct Asked : EngineRequest {
  AnswerStream::Options answer;
};

inline EngineRequest with_text(Asked asked) {
  const auto stream = std::make_shared<AnswerStream>(tokenizer(), std::move(asked.answer));
  asked.on_event = [stream](const TokenEvent& event) { return stream->push(event); };
  return asked;
}

// An engine that runs on a thread of its own, as in the server.
class RunningEngine {
 public:
  struct Options {
    int64_t kv_tokens = 8192;
    int step_tokens = 128;
    int max_running = 64;
    bool async_output = true;
    bool keeps_pages = true;
    int64_t context = 2048;
    bool warms_up = false;
    int draft_tokens = 0;
    DraftChoice draft = DraftChoice::kLookup;
    PrefixSource* prefixes = nullptr;
  };

  explicit RunningEngine(const Options& options) : thread_([this, options] { run(options); }) {
    engine_ = ready_.get_future().get();
  }
  ~RunningEngine() {
    engine_->stop();
    thread_.join();
  }
  Engine& operator*() { return *engine_; }
  Engine* operator->() { return engine_; }

  std::future<Ending> submit(Asked request, SequenceId* id = nullptr) {
    auto promise = std::make_shared<std::promise<Ending>>();
    auto ending = std::make_shared<Ending>();
    request.answer.on_part = [promise, ending](const AnswerPart& part) {
      ending->text += part.text;
      if (part.event->token) {
        ending->tokens.push_back(*part.event->token);
        ending->logprobs.push_back(part.event->logprob);
      }
      for (const ScoredToken& token : part.event->prompt) ending->prompt.push_back(token);
      EXPECT_EQ(part.n_tokens, static_cast<int>(ending->tokens.size()));
      if (!part.finish) return;
      ending->finish = *part.finish;
      ending->cached_tokens = part.event->cached_tokens;
      ending->error = part.event->error;
      promise->set_value(*ending);
    };
    auto future = promise->get_future();
    const SequenceId got = engine_->submit(with_text(std::move(request)));
    if (id) *id = got;
    return future;
  }

 private:
  void run(const Options& options) {
    ModelOptions model{.directory = kTinyR1,
                       .n_threads = 1,
                       .context = options.context,
                       .kv_fraction = 1,
                       .max_kv_tokens = options.kv_tokens,
                       .step_tokens = options.step_tokens,
                       .max_logits = options.max_running,
                       .draft = options.draft_tokens > 0 ? options.draft : DraftChoice::kOff,
                       .draft_tokens = options.draft_tokens,
                       .largest_mtp_share = 1,
                       .attention = AttentionForm::kAbsorbed};
    LoadedModel loaded(model);
    const Vocabulary vocabulary = vocabulary_of(tokenizer(), loaded.config().vocab);
    if (options.warms_up) warm_up(loaded.model(), loaded.cache(), vocabulary, options.context);
    Engine engine(loaded.model(), loaded.cache(), vocabulary_of(tokenizer(), loaded.config().vocab),
                  options.context,
                  {.max_running = options.max_running,
                   .keeps_pages = options.keeps_pages,
                   .output = options.async_output ? &output_ : nullptr,
                   .masks = options.async_output ? &masks_ : nullptr,
                   .drafting = loaded.drafting(),
                   .prefixes = options.prefixes});
    ready_.set_value(&engine);
    engine.run();
    output_.finish();
  }

  OutputThread output_, masks_;
  std::promise<Engine*> ready_;
  Engine* engine_;
  std::thread thread_;
};

inline Asked question(const std::string& text, float temperature = 0, uint64_t seed = 0) {
  Asked request;
  request.request.prompt = ChatFormat(kTinyR1, tokenizer()).prompt(first_messages("", text));
  request.request.max_new_tokens = 160;
  request.request.sampling.temperature = temperature;
  request.request.sampling.seed = seed;
  request.request.stop_ids = tokenizer().stop_ids();
  return request;
}

}  // namespace tandem::test
