#include "api/api_model.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "api/answer_queue.h"
#include "api/api_request.h"
#include "api/api_structs.h"
#include "core/run_error.h"
#include "io/json.h"

namespace tandem {
namespace {

constexpr std::chrono::milliseconds kCancelPeriod(100);  // between calls of tandem_hooks::cancelled

DeviceChoice device_of(const char* name) {
  if (!name) return DeviceChoice::kCpu;
  for (const auto device : {DeviceChoice::kAuto, DeviceChoice::kCpu, DeviceChoice::kCuda})
    if (std::string_view(name) == name_of(device)) return device;
  fail("device {}: choose auto, cpu or cuda", name);
}

std::string text_or_empty(const char* text) { return text ? text : ""; }

DraftChoice draft_of(const tandem_options& o) {
  if (!o.draft) return DraftChoice::kAuto;
  for (const auto choice :
       {DraftChoice::kOff, DraftChoice::kAuto, DraftChoice::kMtp, DraftChoice::kLookup})
    if (std::string(o.draft) == name_of(choice)) return choice;
  fail("draft \"{}\": choose \"off\", \"auto\", \"mtp\" or \"lookup\"", o.draft);
}

EngineThread::Options thread_options(const std::string& directory, const tandem_options& o) {
  require(o.threads >= 0, "threads {}: must be 0 (all cores) or more", o.threads);
  require(o.context >= 0, "context {}: must be 0 (the model's) or more", o.context);
  require(o.max_running >= 0 && o.max_running <= kMaxStepTokens,
          "max_running {}: must be between 0 (256) and {}", o.max_running, kMaxStepTokens);
  require(o.step_tokens >= 0 && o.step_tokens <= kMaxStepTokens,
          "step_tokens {}: must be between 0 ({}) and {}", o.step_tokens, kStepTokens,
          kMaxStepTokens);
  require(o.kv_tokens >= 0, "kv_tokens {}: must be 0 (as kv_fraction allows) or more", o.kv_tokens);
  require(o.kv_fraction >= 0 && o.kv_fraction < 1,
          "kv_fraction {}: must be 0 (0.8) or more, and below 1", o.kv_fraction);
  require(o.draft_tokens >= 0 && o.draft_tokens <= kMaxDraftTokens,
          "draft_tokens {}: must be between 0 (the usual) and {}", o.draft_tokens, kMaxDraftTokens);
  EngineThread::Options options;
  if (o.max_running > 0) options.max_running = o.max_running;
  options.keeps_pages = !o.no_prefix_cache;
  options.async_output = !o.no_async_output;
  ModelOptions& model = options.model;
  model.directory = directory;
  model.device = device_of(o.device);
  model.n_threads = o.threads;
  model.context = o.context;
  model.draft = draft_of(o);
  model.draft_tokens = o.draft_tokens;
  if (o.step_tokens > 0) model.step_tokens = o.step_tokens;
  model.kv_fraction = o.kv_fraction > 0 ? o.kv_fraction : 0.8;
  model.attention = AttentionForm::kAbsorbed;  // an answer does not depend on other requests
  if (o.experts) {
    model.experts = find_weight_format(o.experts);
    require(model.experts.has_value(), "experts {}: choose {}", o.experts, weight_format_names());
  }
  model.placement = text_or_empty(o.placement);
  model.cache = text_or_empty(o.cache);
  if (!model.cache.empty()) model.cache_use = CacheUse::kWrite;
  if (o.on_warning)
    model.warn = [o](const std::string& line) { o.on_warning(o.user, line.c_str()); };
  if (o.on_progress)
    options.progress = [o](int64_t done, int64_t total, double) {
      o.on_progress(o.user, done, total);
    };
  options.model = for_many_sequences(model, ModelConfig::from_directory(directory),
                                     options.max_running, o.kv_tokens);
  return options;
}

// A base model has no chat template.
std::unique_ptr<ChatFormat> chat_format(const std::string& directory, const Tokenizer& tokenizer) {
  try {
    return std::make_unique<ChatFormat>(directory, tokenizer);
  } catch (const Error&) {
    return nullptr;
  }
}

tandem_finish finish_of(const AnswerItem& item) {
  if (!item.finish) return TANDEM_RUNNING;
  switch (*item.finish) {
    case FinishReason::kStop:
      return TANDEM_STOP;
    case FinishReason::kLength:
      return TANDEM_LENGTH;
    default:
      return TANDEM_CANCELLED;
  }
}

std::string describe(const std::string& directory, const LoadedModel& loaded, int n_tokens) {
  const nlohmann::ordered_json json = {{"model", directory},
                                       {"context", loaded.context()},
                                       {"vocabulary", n_tokens},
                                       {"device", loaded.device()},
                                       {"isa", loaded.isa()},
                                       {"threads", loaded.n_threads()},
                                       {"load_seconds", loaded.load_report().seconds}};
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

// The answers of one call of tandem_generate().
class Answers {
 public:
  Answers(Engine& engine, const Tokenizer& tokenizer) : engine_(engine), tokenizer_(tokenizer) {}
  ~Answers() { abort_all(); }

  void add(const tandem_request& request, std::vector<int32_t> prompt) {
    const size_t index = running_.size();
    EngineRequest asked;
    running_.push_back({.id = 0, .prompt_tokens = std::ssize(prompt), .ended = false});
    asked.request = request_of(request, std::move(prompt), tokenizer_, engine_.context());
    AnswerStream::Options options = text_options(request);
    options.on_part = [queue = queue_, index](const AnswerPart& part) {
      const TokenEvent& e = *part.event;
      queue->push({.index = index,
                   .text = part.text,
                   .token = e.token,
                   .logprob = e.logprob,
                   .top = e.top,
                   .cached_tokens = e.cached_tokens,
                   .finish = part.finish,
                   .error = e.error});
    };
    asked.on_event = [stream = std::make_shared<AnswerStream>(tokenizer_, std::move(options))](
                         const TokenEvent& event) { return stream->push(event); };
    running_.back().id = engine_.submit(std::move(asked));
    ++n_running_;
  }

  // Calls the hooks until all answers have ended.
  void deliver(const tandem_hooks& hooks) {
    while (n_running_ > 0) {
      const std::optional<AnswerItem> item = queue_->pop(kCancelPeriod);
      if (item) take(*item, hooks);
      const auto now = Clock::now();
      if (!hooks.cancelled || now - asked_ < kCancelPeriod) continue;
      asked_ = now;
      if (hooks.cancelled(hooks.user) != 0) cancel(hooks);
    }
  }

 private:
  struct Running {
    SequenceId id;
    int64_t prompt_tokens;
    bool ended;
  };

  void take(const AnswerItem& item, const tandem_hooks& hooks) {
    Running& r = running_[item.index];
    if (r.ended) return;
    if (item.finish == FinishReason::kFailed) throw RunError(item.error);
    if (item.finish) end(r);
    if (!show(item, hooks) && !r.ended) {
      engine_.abort(r.id);
      end(r);
    }
  }

  // False if the hook wants no more of this answer.
  bool show(const AnswerItem& item, const tandem_hooks& hooks) const {
    if (!hooks.on_token) return true;
    std::vector<tandem_logprob> top;
    for (const TokenLogprob& t : item.top) top.push_back({t.token, t.logprob});
    const tandem_token token = {.index = item.index,
                                .text = item.text.c_str(),
                                .text_bytes = item.text.size(),
                                .token = item.token.value_or(-1),
                                .logprob = item.logprob,
                                .top = top.data(),
                                .n_top = top.size(),
                                .prompt_tokens = running_[item.index].prompt_tokens,
                                .cached_tokens = item.cached_tokens,
                                .finish = finish_of(item)};
    return hooks.on_token(hooks.user, &token) == 0;
  }

  void cancel(const tandem_hooks& hooks) {
    abort_all();
    for (size_t i = 0; i < running_.size(); ++i) {
      if (running_[i].ended) continue;
      end(running_[i]);
      AnswerItem last{};
      last.index = i;
      last.finish = FinishReason::kCancelled;
      show(last, hooks);
    }
  }

  void end(Running& r) {
    r.ended = true;
    --n_running_;
  }

  void abort_all() {
    for (const Running& r : running_)
      if (r.id > 0 && !r.ended) engine_.abort(r.id);
  }

  Engine& engine_;
  const Tokenizer& tokenizer_;
  const std::shared_ptr<AnswerQueue> queue_ = std::make_shared<AnswerQueue>();
  std::vector<Running> running_;
  int n_running_ = 0;
  Clock::time_point asked_ = Clock::now();
};

}  // namespace

ApiModel::ApiModel(const std::string& directory, const tandem_options& options)
    : tokenizer_(Tokenizer::from_directory(directory)), chat_(chat_format(directory, tokenizer_)) {
  std::future<void> opened = opened_.get_future();
  const auto on_ready = [&](Engine& engine, const LoadedModel& loaded) {
    description_ = describe(directory, loaded, engine.vocabulary_size());
    engine_ = &engine;
    opened_.set_value();
  };
  const auto on_failed = [this] {
    if (!engine_) opened_.set_exception(std::current_exception());
  };
  thread_ = std::make_unique<EngineThread>(tokenizer_, thread_options(directory, options),
                                           EngineThread::Hooks{on_ready, on_failed});
  opened.get();
}

void ApiModel::generate(std::span<const tandem_request> requests, const tandem_hooks& hooks) {
  std::vector<std::vector<int32_t>> prompts;
  for (const tandem_request& request : requests) prompts.push_back(prompt(request));
  Answers answers(*engine_, tokenizer_);
  for (size_t i = 0; i < requests.size(); ++i) answers.add(requests[i], std::move(prompts[i]));
  answers.deliver(hooks);
}

std::vector<int32_t> ApiModel::prompt(const tandem_request& request) const {
  return prompt_of(request, tokenizer_, chat_.get());
}

}  // namespace tandem
