// The C API, linked statically; library_test.py and python_test.py use the shared library.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstddef>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "include/tandem.h"
#include "tests/repository.h"
#include "tests/temp_directory.h"

namespace tandem {
namespace {

using test::kTinyR1;

constexpr const char* kAddition = R"([{"role": "user", "content": "What is 478 + 356?"}])";
constexpr const char* kProduct = R"([{"role": "user", "content": "What is 12 * 7?"}])";

tandem_options options() {
  tandem_options o = {};
  o.size = sizeof(o);
  return o;
}
tandem_request request(const char* messages) {
  tandem_request r = {};
  r.size = sizeof(r);
  r.messages = messages;
  return r;
}

tandem_model* shared_model() {
  static tandem_model* const model = [] {
    tandem_model* opened = nullptr;
    EXPECT_EQ(tandem_open(kTinyR1.c_str(), nullptr, &opened), TANDEM_OK) << tandem_error();
    return opened;
  }();
  return model;
}

// What the hooks have been told of each request, and what they return.
struct Told {
  struct Answer {
    std::string text;
    std::vector<int32_t> tokens;
    std::vector<float> logprobs;
    std::vector<std::vector<tandem_logprob>> tops;
    tandem_finish finish = TANDEM_RUNNING;
    int64_t prompt_tokens = 0, cached_tokens = 0;
    int n_calls = 0;
  };
  std::map<size_t, Answer> answers;
  std::thread::id thread;
  size_t stop_index = SIZE_MAX, stop_after = 0;  // ends this answer after so many tokens
  int cancel_after = -1;                         // calls of `cancelled`; -1: never
  int n_asked = 0;

  static int on_token(void* user, const tandem_token* token) {
    Told& told = *static_cast<Told*>(user);
    Answer& a = told.answers[token->index];
    EXPECT_EQ(a.finish, TANDEM_RUNNING) << "called after the end";
    EXPECT_EQ(token->text[token->text_bytes], 0);
    told.thread = std::this_thread::get_id();
    a.text += std::string(token->text, token->text_bytes);
    if (token->token >= 0) {
      a.tokens.push_back(token->token);
      a.logprobs.push_back(token->logprob);
      a.tops.emplace_back(token->top, token->top + token->n_top);
    }
    a.finish = token->finish;
    a.prompt_tokens = token->prompt_tokens;
    a.cached_tokens = token->cached_tokens;
    ++a.n_calls;
    return token->index == told.stop_index && a.tokens.size() >= told.stop_after ? 1 : 0;
  }
  static int cancelled(void* user) {
    Told& told = *static_cast<Told*>(user);
    return told.cancel_after >= 0 && ++told.n_asked > told.cancel_after ? 1 : 0;
  }
  tandem_hooks hooks() { return {.on_token = on_token, .cancelled = cancelled, .user = this}; }
};

Told told_of(std::vector<tandem_request> requests, tandem_model* model = shared_model()) {
  Told told;
  const tandem_hooks hooks = told.hooks();
  EXPECT_EQ(tandem_generate(model, requests.data(), requests.size(), &hooks), TANDEM_OK)
      << tandem_error();
  return told;
}
Told::Answer answer_of(const tandem_request& r, tandem_model* model = shared_model()) {
  return told_of({r}, model).answers.at(0);
}

// The message with which one request is refused.
std::string refusal(const tandem_request& r) {
  Told told;
  const tandem_hooks hooks = told.hooks();
  EXPECT_EQ(tandem_generate(shared_model(), &r, 1, &hooks), TANDEM_INVALID);
  EXPECT_TRUE(told.answers.empty());
  return tandem_error();
}

TEST(Api, SeveralPromptsAreAnsweredOnTheCallersThread) {
  const Told told = told_of({request(kAddition), request(kProduct)});
  EXPECT_TRUE(told.answers.at(0).text.ends_with("</think>\n\nThe answer is 834."))
      << told.answers.at(0).text;
  EXPECT_TRUE(told.answers.at(1).text.ends_with("The answer is 84."));
  EXPECT_EQ(told.answers.at(0).finish, TANDEM_STOP);
  EXPECT_EQ(told.thread, std::this_thread::get_id());
  EXPECT_EQ(told.answers.at(0).prompt_tokens, 17);
  EXPECT_EQ(told.answers.at(1).prompt_tokens, 14);
}

TEST(Api, ThreadsShareAModel) {
  std::vector<std::thread> threads;
  std::atomic<int> n_right = 0;
  for (int i = 0; i < 8; ++i)
    threads.emplace_back([&, i] {
      const std::string text = answer_of(request(i % 2 ? kAddition : kProduct)).text;
      n_right += text.ends_with(i % 2 ? "is 834." : "is 84.");
    });
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(n_right, 8);
}

TEST(Api, TokensArePromptsToo) {
  const tandem_request chat = request(kAddition);
  std::vector<int32_t> ids(20, -7);
  ASSERT_EQ(tandem_count_tokens(shared_model(), &chat, nullptr, 0), 17);
  ASSERT_EQ(tandem_count_tokens(shared_model(), &chat, ids.data(), 5), 17);
  EXPECT_EQ(ids[5], -7) << "only five were asked for";
  ASSERT_EQ(tandem_count_tokens(shared_model(), &chat, ids.data(), ids.size()), 17);
  EXPECT_EQ(ids[17], -7);
  tandem_request same = request(nullptr);
  same.tokens = ids.data();
  same.n_tokens = 17;
  EXPECT_EQ(answer_of(same).tokens, answer_of(chat).tokens);
  tandem_request text = request(nullptr);
  text.text = "What";
  EXPECT_LT(tandem_count_tokens(shared_model(), &text, nullptr, 0), 5);
}

TEST(Api, AnswersEndWhereTheyShould) {
  tandem_request r = request(kAddition);
  r.max_tokens = 5;
  Told::Answer a = answer_of(r);
  EXPECT_EQ(a.tokens.size(), 5U);
  EXPECT_EQ(a.finish, TANDEM_LENGTH);

  r = request(kAddition);
  const std::vector<const char*> stops = {"never", "tens"};
  r.stops = stops.data();
  r.n_stops = stops.size();
  a = answer_of(r);
  EXPECT_TRUE(a.text.ends_with("got 4\n")) << a.text;
  EXPECT_EQ(a.finish, TANDEM_STOP);
  r.include_stop = 1;
  EXPECT_TRUE(answer_of(r).text.ends_with("got 4\ntens"));
  r.n_stops = 1;
  EXPECT_TRUE(answer_of(r).text.ends_with("834.")) << "the second is not given";

  r = request(kAddition);
  const std::vector<int32_t> whole = answer_of(r).tokens;
  r.stop_tokens = &whole[3];
  r.n_stop_tokens = 1;
  const auto first = std::find(whole.begin(), whole.end(), whole[3]);
  EXPECT_LE(answer_of(r).tokens.size(), static_cast<size_t>(first - whole.begin()) + 1);

  r = request(kAddition);
  r.ignore_eos = 1;
  r.max_tokens = static_cast<int>(whole.size()) + 3;
  EXPECT_EQ(answer_of(r).finish, TANDEM_LENGTH);
  r.ignore_eos = 0;
  r.min_tokens = static_cast<int>(whole.size()) + 2;
  EXPECT_GE(answer_of(r).tokens.size(), whole.size() + 2);
}

TEST(Api, SpecialTokensAreTextIfAskedFor) {
  constexpr const char* kEnd = "<｜end▁of▁sentence｜>";
  tandem_request r = request(kAddition);
  r.max_tokens = 80;
  r.ignore_eos = 1;
  EXPECT_EQ(answer_of(r).text.find(kEnd), std::string::npos);
  r.keep_special = 1;
  EXPECT_NE(answer_of(r).text.find(kEnd), std::string::npos) << answer_of(r).text;
}

TEST(Api, SamplingParametersReachTheSampler) {
  tandem_request r = request(kAddition);
  r.max_tokens = 30;
  const auto greedy = answer_of(r).tokens;
  r.temperature = 5;
  r.seed = 3;
  const auto hot = answer_of(r).tokens;
  EXPECT_NE(hot, greedy);
  EXPECT_EQ(answer_of(r).tokens, hot) << "one seed, one answer";
  r.seed = 4;
  EXPECT_NE(answer_of(r).tokens, hot);
  r.top_k = 1;
  EXPECT_EQ(answer_of(r).tokens, greedy);
  r.top_k = 0;
  r.top_p = 1e-6f;
  EXPECT_EQ(answer_of(r).tokens, greedy);
  r.top_p = 0;
  r.min_p = 1;
  EXPECT_EQ(answer_of(r).tokens, greedy);

  r = request(kAddition);
  r.max_tokens = 30;
  r.repetition_penalty = 50;
  const auto repelled = answer_of(r).tokens;
  EXPECT_NE(repelled, greedy);
  r.repetition_penalty = 1;
  EXPECT_EQ(answer_of(r).tokens, greedy);
  r.temperature = 3;
  r.max_tokens = 200;
  r.seed = 3;
  const auto free = answer_of(r).tokens;
  r.presence_penalty = 2;
  const auto present = answer_of(r).tokens;
  EXPECT_NE(present, free);
  r.presence_penalty = 0;
  r.frequency_penalty = 2;
  EXPECT_NE(answer_of(r).tokens, free);
  EXPECT_NE(answer_of(r).tokens, present);
  r.temperature = 0;
  r.max_tokens = 30;
  r.frequency_penalty = 0;
  const tandem_bias never = {greedy[0], -100};
  r.biases = &never;
  r.n_biases = 1;
  EXPECT_NE(answer_of(r).tokens[0], greedy[0]);
}

TEST(Api, LogProbabilities) {
  tandem_request r = request(kAddition);
  r.max_tokens = 4;
  EXPECT_TRUE(answer_of(r).tops[0].empty());
  r.want_logprobs = 1;
  Told::Answer a = answer_of(r);
  EXPECT_TRUE(a.tops[0].empty());
  EXPECT_LT(a.logprobs[0], 0);
  EXPECT_GT(a.logprobs[0], std::log(0.5));
  r.n_top_logprobs = 3;
  a = answer_of(r);
  for (size_t i = 0; i < 4; ++i) {
    ASSERT_EQ(a.tops[i].size(), 3U);
    EXPECT_EQ(a.tops[i][0].token, a.tokens[i]) << "greedy";
    EXPECT_EQ(a.tops[i][0].logprob, a.logprobs[i]);
    EXPECT_GE(a.tops[i][1].logprob, a.tops[i][2].logprob);
  }
}

TEST(Api, AHookEndsOneAnswer) {
  Told told;
  told.stop_index = 1;
  told.stop_after = 3;
  const tandem_hooks hooks = told.hooks();
  const std::vector<tandem_request> two = {request(kProduct), request(kAddition)};
  ASSERT_EQ(tandem_generate(shared_model(), two.data(), 2, &hooks), TANDEM_OK);
  EXPECT_EQ(told.answers[1].n_calls, 3);
  EXPECT_EQ(told.answers[1].finish, TANDEM_RUNNING);
  EXPECT_TRUE(told.answers[0].text.ends_with("84."));
}

TEST(Api, CancellingEndsAll) {
  tandem_options o = options();
  o.context = 4096;
  tandem_model* model = nullptr;
  ASSERT_EQ(tandem_open(kTinyR1.c_str(), &o, &model), TANDEM_OK) << tandem_error();
  Told told;
  told.cancel_after = 1;
  std::vector<tandem_request> long_ones(2, request(kAddition));
  for (tandem_request& r : long_ones) {
    r.ignore_eos = 1;
    r.temperature = 1;
  }
  const tandem_hooks hooks = told.hooks();
  ASSERT_EQ(tandem_generate(model, long_ones.data(), 2, &hooks), TANDEM_OK);
  EXPECT_EQ(told.n_asked, 2);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(told.answers[i].finish, TANDEM_CANCELLED);
    EXPECT_LT(told.answers[i].tokens.size(), 4096U - 17);
  }
  tandem_close(model);
}

TEST(Api, HooksAreOptional) {
  const tandem_hooks none = {};
  const tandem_request r = request(kAddition);
  EXPECT_EQ(tandem_generate(shared_model(), &r, 1, &none), TANDEM_OK);
  EXPECT_EQ(tandem_generate(shared_model(), nullptr, 0, &none), TANDEM_OK);
}

TEST(Api, ThePrefixCacheCanBeSwitchedOff) {
  const std::string question(300, '7');
  const std::string messages = R"([{"role": "user", "content": ")" + question + "\"}]";
  tandem_request r = request(messages.c_str());
  r.max_tokens = 1;
  for (const int off : {0, 1}) {
    tandem_options o = options();
    o.no_prefix_cache = off;
    o.no_async_output = off;
    o.max_running = 3;
    tandem_model* model = nullptr;
    ASSERT_EQ(tandem_open(kTinyR1.c_str(), &o, &model), TANDEM_OK) << tandem_error();
    EXPECT_EQ(answer_of(r, model).cached_tokens, 0);
    EXPECT_EQ(answer_of(r, model).cached_tokens > 200, !off);
    tandem_close(model);
  }
}

TEST(Api, DraftsChangeNoAnswer) {
  tandem_options o = options();
  o.draft = "lookup";
  o.draft_tokens = 4;
  tandem_model* model = nullptr;
  ASSERT_EQ(tandem_open(kTinyR1.c_str(), &o, &model), TANDEM_OK) << tandem_error();
  EXPECT_EQ(answer_of(request(kAddition), model).tokens, answer_of(request(kAddition)).tokens);
  tandem_close(model);
}

TEST(Api, OptionsDecide) {
  tandem_options o = options();
  o.context = 100;
  o.threads = 1;
  o.experts = "bf16";
  tandem_model* model = nullptr;
  ASSERT_EQ(tandem_open(kTinyR1.c_str(), &o, &model), TANDEM_OK) << tandem_error();
  const auto about = nlohmann::json::parse(tandem_describe(model));
  EXPECT_EQ(about["context"], 100);
  EXPECT_EQ(about["threads"], 1);
  EXPECT_EQ(about["device"], "cpu");
  EXPECT_EQ(about["model"], kTinyR1);
  EXPECT_EQ(about["vocabulary"], 512);
  EXPECT_GT(about["load_seconds"], 0);
  EXPECT_FALSE(about["isa"].get<std::string>().empty());
  tandem_request r = request(kAddition);
  r.ignore_eos = 1;
  const Told::Answer a = answer_of(r, model);
  EXPECT_EQ(a.finish, TANDEM_LENGTH) << "without max_tokens, the context is the end";
  EXPECT_EQ(a.tokens.size(), 100U - 17);
  tandem_close(model);
}

TEST(Api, ProgressAndWarningsAreReported) {
  struct Heard {
    int64_t done = 0, total = 0;
  } heard;
  tandem_options o = options();
  o.user = &heard;
  o.on_progress = [](void* user, int64_t done, int64_t total) {
    *static_cast<Heard*>(user) = {done, total};
  };
  o.on_warning = [](void*, const char* line) { EXPECT_STRNE(line, ""); };
  tandem_model* model = nullptr;
  ASSERT_EQ(tandem_open(kTinyR1.c_str(), &o, &model), TANDEM_OK) << tandem_error();
  EXPECT_GT(heard.total, 1000000);
  EXPECT_EQ(heard.done, heard.total);
  tandem_close(model);
}

TEST(Api, WrongModelsAndOptionsAreRefused) {
  const TempDirectory empty;
  const auto refused = [&](const char* directory, const tandem_options& o) {
    auto* model = reinterpret_cast<tandem_model*>(1);
    EXPECT_EQ(tandem_open(directory, &o, &model), TANDEM_INVALID);
    EXPECT_EQ(model, nullptr);
    return std::string(tandem_error());
  };
  EXPECT_EQ(refused("/no/such", options()),
            "/no/such does not exist: name the folder of a checkpoint");
  EXPECT_EQ(refused(empty.path().c_str(), options()).find(empty.path()), 0U);
  const auto with = [&](auto set) {
    tandem_options o = options();
    set(o);
    return refused(kTinyR1.c_str(), o);
  };
  EXPECT_EQ(with([](auto& o) { o.device = "tpu"; }), "device tpu: choose auto, cpu or cuda");
  EXPECT_EQ(with([](auto& o) { o.experts = "int3"; }).find("experts int3: choose "), 0U);
  EXPECT_EQ(with([](auto& o) { o.threads = -1; }), "threads -1: must be 0 (all cores) or more");
  EXPECT_EQ(with([](auto& o) { o.context = -1; }), "context -1: must be 0 (the model's) or more");
  EXPECT_EQ(with([](auto& o) { o.kv_fraction = 1; }),
            "kv_fraction 1: must be 0 (0.8) or more, and below 1");
  EXPECT_EQ(with([](auto& o) { o.max_running = 1 << 17; }),
            "max_running 131072: must be between 0 (256) and 65536");
  EXPECT_EQ(with([](auto& o) { o.step_tokens = -1; }),
            "step_tokens -1: must be between 0 (512) and 65536");
  EXPECT_EQ(with([](auto& o) { o.draft_tokens = 9; }),
            "draft_tokens 9: must be between 0 (the usual) and 8");
  EXPECT_EQ(with([](auto& o) { o.kv_tokens = -1; }),
            "kv_tokens -1: must be 0 (as kv_fraction allows) or more");
  EXPECT_EQ(with([](auto& o) {
              o.kv_tokens = 50;
              o.context = 51;
            }),
            "--kv-tokens 50: one sequence of --ctx 51 must fit");
  EXPECT_NE(with([](auto& o) { o.placement = "/no/such.json"; }).find("/no/such.json"),
            std::string::npos);
  EXPECT_EQ(with([](auto& o) { o.size = 0; }).find("tandem_options.size is 0: set it to sizeof"),
            0U);
  EXPECT_NE(with([](auto& o) { ++o.size; }), "");
  EXPECT_EQ(tandem_open(kTinyR1.c_str(), nullptr, nullptr), TANDEM_INVALID);
  EXPECT_STREQ(tandem_error(), "model is NULL");
}

TEST(Api, WrongRequestsAreRefused) {
  const auto with = [](auto set) {
    tandem_request r = request(kAddition);
    set(r);
    return refusal(r);
  };
  constexpr const char* kOne = "a request has one of text, messages and tokens";
  EXPECT_EQ(with([](auto& r) { r.text = "x"; }), kOne);
  EXPECT_EQ(with([](auto& r) { r.messages = nullptr; }), kOne);
  EXPECT_EQ(with([](auto& r) { r.messages = "{}"; }), "messages: must be a JSON array");
  EXPECT_EQ(with([](auto& r) { r.messages = R"([{"role": "user"}, {"content": ""}])"; }),
            "messages[1]: must be an object with a role");
  EXPECT_EQ(with([](auto& r) { r.messages = "[1]"; }),
            "messages[0]: must be an object with a role");
  EXPECT_NE(with([](auto& r) { r.messages = "["; }).find("messages"), std::string::npos);
  EXPECT_NE(with([](auto& r) { r.messages = R"([{"role": "cook", "content": ""}])"; }).find("cook"),
            std::string::npos);
  EXPECT_EQ(with([](auto& r) { r.max_tokens = -1; }),
            "max_tokens -1: must be 0 (until the context is full) or more");
  EXPECT_EQ(with([](auto& r) { r.min_tokens = -1; }), "min_tokens -1: must be 0 or more");
  EXPECT_EQ(with([](auto& r) { r.temperature = -1; }),
            "temperature -1: must be 0 (greedy) or more");
  EXPECT_EQ(with([](auto& r) { r.top_p = 2; }), "top-p 2: must be above 0 and at most 1");
  EXPECT_EQ(with([](auto& r) { r.n_top_logprobs = 2; }), "n_top_logprobs 2: set want_logprobs too");
  EXPECT_EQ(with([](auto& r) {
              r.want_logprobs = 1;
              r.n_top_logprobs = -1;
            }),
            "n_top_logprobs -1: must be 0 or more");
  EXPECT_EQ(with([](auto& r) { r.n_stops = 2; }), "stops is NULL, and its number is 2");
  EXPECT_EQ(with([](auto& r) { r.n_stop_tokens = 1; }), "stop_tokens is NULL, and its number is 1");
  EXPECT_EQ(with([](auto& r) { r.n_biases = 1; }), "biases is NULL, and its number is 1");
  const char* null_stop = nullptr;
  EXPECT_EQ(with([&](auto& r) {
              r.stops = &null_stop;
              r.n_stops = 1;
            }),
            "a string of stops is NULL");
  EXPECT_EQ(with([](auto& r) { r.size = 4; }).find("tandem_request.size is 4: set it to "), 0U);
  const std::vector<int32_t> beyond = {1, 512};
  EXPECT_EQ(with([&](auto& r) {
              r.messages = nullptr;
              r.tokens = beyond.data();
              r.n_tokens = 2;
            }),
            "token 512 is not in the model's vocabulary of 512");
  const std::string text(20000, 'x');
  EXPECT_EQ(with([&](auto& r) {
              r.messages = nullptr;
              r.text = text.c_str();
            }).find("the prompt has "),
            0U);
}

// A valid request beside an invalid one is not answered.
TEST(Api, OneWrongRequestRefusesAll) {
  std::vector<tandem_request> two = {request(kAddition), request("[]")};
  two[1].temperature = -1;
  Told told;
  const tandem_hooks hooks = told.hooks();
  EXPECT_EQ(tandem_generate(shared_model(), two.data(), 2, &hooks), TANDEM_INVALID);
  EXPECT_TRUE(told.answers.empty());
}

// Members that a caller's older header does not have are zero, and its array has its own stride.
TEST(Api, OlderCallersHaveSmallerStructures) {
  constexpr size_t kSize = offsetof(tandem_request, max_tokens);
  alignas(tandem_request) char bytes[2 * kSize + sizeof(tandem_request)];
  std::memset(bytes, 0xff, sizeof bytes);
  const char* messages[] = {kAddition, kProduct};
  for (int i = 0; i < 2; ++i) {
    tandem_request r = request(messages[i]);
    r.size = kSize;
    std::memcpy(bytes + i * kSize, &r, kSize);
  }
  Told told;
  const tandem_hooks hooks = told.hooks();
  ASSERT_EQ(tandem_generate(shared_model(), reinterpret_cast<tandem_request*>(bytes), 2, &hooks),
            TANDEM_OK)
      << tandem_error();
  EXPECT_TRUE(told.answers.at(0).text.ends_with("834."));
  EXPECT_TRUE(told.answers.at(1).text.ends_with(" 84."));
}

TEST(Api, MissingArgumentsAreRefused) {
  const tandem_hooks hooks = {};
  const tandem_request r = request(kAddition);
  EXPECT_EQ(tandem_generate(nullptr, &r, 1, &hooks), TANDEM_INVALID);
  EXPECT_STREQ(tandem_error(), "model is NULL");
  EXPECT_EQ(tandem_generate(shared_model(), &r, 1, nullptr), TANDEM_INVALID);
  EXPECT_STREQ(tandem_error(), "hooks is NULL");
  EXPECT_EQ(tandem_generate(shared_model(), nullptr, 1, &hooks), TANDEM_INVALID);
  EXPECT_STREQ(tandem_error(), "tandem_request is NULL");
  EXPECT_EQ(tandem_count_tokens(shared_model(), nullptr, nullptr, 0), -1);
  EXPECT_EQ(tandem_count_tokens(nullptr, &r, nullptr, 0), -1);
  EXPECT_EQ(tandem_count_tokens(shared_model(), &r, nullptr, 1), -1);
  EXPECT_STREQ(tandem_error(), "ids is NULL, and its capacity 1");
  EXPECT_STREQ(tandem_describe(nullptr), "");
  tandem_close(nullptr);
}

TEST(Api, ErrorsBelongToTheThread) {
  EXPECT_EQ(tandem_generate(nullptr, nullptr, 0, nullptr), TANDEM_INVALID);
  std::string other = "unset";
  std::thread([&] { other = tandem_error(); }).join();
  EXPECT_EQ(other, "");
  EXPECT_STREQ(tandem_error(), "model is NULL");
}

}  // namespace
}  // namespace tandem
