// Answers of the server to single requests, with the embedded model and an engine whose steps the
// test runs: parts that are sent, times that are counted, usage, and how a request ends.
#include "server/generation.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "loader/loaded_model.h"
#include "tests/error_of.h"
#include "tests/repository.h"

namespace tandem::test {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kWaited = 1000;  // seconds between a request's arrival and its first step
constexpr int kContext = 1024;

class GenerationTest : public testing::Test {
 protected:
  struct Ended {
    std::vector<Generation::Output> parts;
    Json body() const { return Json::parse(parts.back().bytes); }
    std::string bytes() const {
      std::string all;
      for (const Generation::Output& part : parts) all += part.bytes;
      return all;
    }
  };

  std::shared_ptr<Generation> generation(const Json& request, std::vector<std::string> prompts) {
    Generation::Setup setup;
    setup.request = parse_completion_request(request, {});
    setup.info = {setup.request.endpoint, "id", "m", 7};
    for (const std::string& prompt : prompts) setup.prompts.push_back(tokenizer_.encode(prompt));
    setup.received = Clock::now() - std::chrono::seconds(static_cast<int>(kWaited));
    return std::make_shared<Generation>(std::move(setup), engine_, tokenizer_, metrics_,
                                        [this](const std::string& line) { log_ = line; });
  }
  // Runs steps until the last part.
  Ended answer(Json request, std::vector<std::string> prompts = {"Let me"}) {
    request.update({{"prompt", "x"}, {"temperature", 0}, {"ignore_eos", true}});
    Ended ended;
    generation(request, std::move(prompts))->start([&](Generation::Output part) {
      ended.parts.push_back(std::move(part));
    });
    while (engine_.step()) {
    }
    EXPECT_TRUE(!ended.parts.empty() && ended.parts.back().last);
    return ended;
  }

  double metric(const std::string& name) const {
    const std::string text = metrics_.text("m", nullptr);
    const size_t at = text.find("\ntandem:" + name + "{");
    return std::stod(text.substr(text.find("} ", at) + 2));
  }
  double seconds(const std::string& name) const { return metric(name + "_seconds_sum"); }

  const Tokenizer tokenizer_ = Tokenizer::from_directory(kTinyR1);
  LoadedModel loaded_{{.directory = kTinyR1,
                       .n_threads = 1,
                       .context = kContext,
                       .max_kv_tokens = 4 * kContext,
                       .step_tokens = 64,
                       .max_logits = 8}};
  Engine engine_{loaded_.model(), loaded_.cache(), {loaded_.config().vocab, {}}, kContext, {}};
  Metrics metrics_;
  std::string log_;
};

TEST_F(GenerationTest, TimesAreThoseOfTheirParts) {
  const Json body = answer({{"max_tokens", 4}}).body();
  EXPECT_EQ(body["usage"]["completion_tokens"], 4);
  for (const char* waited : {"request_queue_time", "time_to_first_token", "e2e_request_latency"}) {
    EXPECT_GE(seconds(waited), kWaited) << waited;
    EXPECT_LT(seconds(waited), 1.5 * kWaited) << waited;
  }
  for (const char* computed : {"request_prefill_time", "request_decode_time"}) {
    EXPECT_GT(seconds(computed), 0) << computed;
    EXPECT_LT(seconds(computed), kWaited / 2) << computed;
  }
  EXPECT_EQ(metric("time_to_first_token_seconds_count"), 1);
  EXPECT_EQ(metric("time_per_output_token_seconds_count"), 3);
  EXPECT_NEAR(seconds("time_per_output_token"), seconds("request_decode_time"), 1e-6);
  EXPECT_EQ(metric("request_prompt_tokens_sum"), body["usage"]["prompt_tokens"]);
  EXPECT_EQ(metric("request_generation_tokens_sum"), 4);
  EXPECT_TRUE(log_.starts_with(fmt::format("id prompt={} cached=0 generated=4 answers=1 first=100",
                                           body["usage"]["prompt_tokens"].get<int>())))
      << log_;
  EXPECT_TRUE(says(log_, "s total=100"));
  EXPECT_TRUE(log_.ends_with("s length")) << log_;
}

TEST_F(GenerationTest, ARequestThatNeverRanOnlyWaited) {
  const Ended ended = answer({{"max_tokens", 4}, {"timeout", kWaited / 2}});
  ASSERT_EQ(ended.parts.size(), 1u);
  EXPECT_EQ(ended.parts[0].status, 504);
  EXPECT_TRUE(ended.parts[0].is_complete_body && !ended.parts[0].aborts_stream);
  EXPECT_EQ(ended.body()["error"]["message"], "the request timed out");
  for (const char* never : {"request_queue_time", "request_prefill_time", "request_decode_time"})
    EXPECT_EQ(seconds(never), 0) << never;
  EXPECT_GE(seconds("e2e_request_latency"), kWaited);
  EXPECT_EQ(metric("time_to_first_token_seconds_count"), 0);
  EXPECT_TRUE(says(log_, "generated=0 answers=1 first=0.000s total=100")) << log_;
}

TEST_F(GenerationTest, ADeadlineCountsFromTheArrival) {
  const Ended ended = answer({{"max_tokens", 4}, {"timeout", 2 * kWaited}});
  EXPECT_EQ(ended.parts.back().status, 200);
}

// Two answers to each of two prompts; the second time, all but the last token of both is cached.
TEST_F(GenerationTest, UsageCountsEachPromptOnce) {
  std::vector<std::string> prompts = {"", ""};
  for (int i = 0; i < 40; ++i) {
    prompts[0] += fmt::format("What is {} + 1? ", i);
    prompts[1] += fmt::format("One and {}. ", i);
  }
  int n = 0;
  for (const std::string& prompt : prompts) n += static_cast<int>(tokenizer_.encode(prompt).size());
  answer({{"max_tokens", 3}, {"n", 2}}, prompts);
  const Json usage = answer({{"max_tokens", 3}, {"n", 2}}, prompts).body()["usage"];
  EXPECT_EQ(usage["prompt_tokens"], n);
  EXPECT_EQ(usage["completion_tokens"], 4 * 3);
  EXPECT_EQ(usage["prompt_tokens_details"]["cached_tokens"], n - 2);
  EXPECT_TRUE(says(log_, fmt::format("id prompt={} cached={} generated=12 answers=4 ", n, n - 2)));
}

TEST_F(GenerationTest, AStreamIsOnePartForEachTextAndTheEnd) {
  const std::string text = answer({{"max_tokens", 5}}).body()["choices"][0]["text"];
  const auto chunks = [&](const Json& options) {
    Json request = {{"max_tokens", 5}, {"stream", true}};
    if (!options.is_null()) request["stream_options"] = options;
    std::vector<Json> all;
    const Ended ended = answer(request);
    for (const Generation::Output& part : ended.parts) {
      EXPECT_EQ(part.status, 200);
      EXPECT_FALSE(part.is_complete_body || part.aborts_stream);
      EXPECT_EQ(part.last, &part == &ended.parts.back());
    }
    std::string bytes = ended.bytes();
    for (size_t end; (end = bytes.find("\n\n")) != std::string::npos; bytes.erase(0, end + 2)) {
      EXPECT_TRUE(bytes.starts_with("data: "));
      const std::string data = bytes.substr(6, end - 6);
      if (data == "[DONE]")
        EXPECT_EQ(bytes.size(), end + 2);
      else
        all.push_back(Json::parse(data));
    }
    return all;
  };
  const auto counts = [&](const Json& options) {  // completion tokens in the usage of each chunk
    std::string n, all;
    for (const Json& chunk : chunks(options)) {
      const bool has = chunk.contains("usage") && !chunk["usage"].is_null();
      n += has ? chunk["usage"]["completion_tokens"].dump() : "-";
      for (const Json& choice : chunk["choices"]) all += choice["text"];
    }
    EXPECT_EQ(all, text);
    return n;
  };
  EXPECT_EQ(counts(nullptr), "12345");
  EXPECT_EQ(counts({{"include_usage", true}}), "-----5");
  EXPECT_EQ(counts({{"include_usage", true}, {"continuous_usage_stats", true}}), "123455");
  EXPECT_TRUE(chunks({{"include_usage", true}}).back()["choices"].empty());
}

// A server that stops while one stream has begun and another request waits.
TEST_F(GenerationTest, AStreamThatHasBegunEndsWithTheError) {
  const auto ask = [&](bool stream) {
    return generation({{"prompt", "x"}, {"max_tokens", 500}, {"stream", stream}}, {"Let"});
  };
  std::vector<Generation::Output> begun, whole;
  const auto one = ask(true), other = ask(false);
  one->start([&](Generation::Output part) { begun.push_back(std::move(part)); });
  for (int i = 0; i < 5; ++i) engine_.step();
  other->start([&](Generation::Output part) { whole.push_back(std::move(part)); });
  engine_.step();
  EXPECT_GE(begun.size(), 2u);
  EXPECT_TRUE(whole.empty());
  engine_.stop();
  engine_.run();
  EXPECT_TRUE(begun.back().last && begun.back().aborts_stream);
  EXPECT_FALSE(begun.back().is_complete_body);
  EXPECT_EQ(begun.back().status, 200);
  EXPECT_TRUE(says(begun.back().bytes, "the server is stopping"));
  ASSERT_EQ(whole.size(), 1u);
  EXPECT_TRUE(whole[0].last && whole[0].is_complete_body && !whole[0].aborts_stream);
  EXPECT_EQ(whole[0].status, 503);
  EXPECT_EQ(Json::parse(whole[0].bytes)["error"]["message"], "the server is stopping");
  EXPECT_TRUE(log_.ends_with("s abort")) << log_;
}

// The engine computes nothing more, and nothing more is sent.
TEST_F(GenerationTest, ACancelledRequestLeavesTheEngine) {
  const auto one =
      generation({{"prompt", "x"}, {"max_tokens", 500}, {"n", 2}, {"stream", true}}, {"Let", "me"});
  int n_parts = 0;
  one->start([&](Generation::Output) { ++n_parts; });
  for (int i = 0; i < 3; ++i) engine_.step();
  EXPECT_EQ(engine_.counts().scheduler.n_running, 4);
  EXPECT_GT(n_parts, 0);
  one->cancel();
  const int before = n_parts;
  while (engine_.step()) {
  }
  EXPECT_EQ(engine_.counts().scheduler.n_running, 0);
  EXPECT_EQ(n_parts, before);
  int late = 0;
  const auto cancelled_before = generation({{"prompt", "x"}, {"max_tokens", 9}}, {"Let"});
  cancelled_before->cancel();
  cancelled_before->start([&](Generation::Output) { ++late; });
  while (engine_.step()) {
  }
  EXPECT_EQ(late, 0);
}

// The second prompt is longer than the context, so the first one is cancelled too.
TEST_F(GenerationTest, ARefusedPromptRefusesTheRequest) {
  std::string longer;
  for (int i = 0; i < 2 * kContext; ++i) longer += fmt::format("{} ", i);
  const auto one = generation({{"prompt", "x"}, {"max_tokens", 9}}, {"Let", longer});
  int n_parts = 0;
  try {
    one->start([&](Generation::Output) { ++n_parts; });
    ADD_FAILURE() << "the request was taken";
  } catch (const ApiError& error) {
    EXPECT_EQ(error.status, 400);
    EXPECT_TRUE(says(error.what(), "1024"));
  }
  while (engine_.step()) {
  }
  EXPECT_EQ(n_parts, 0);
}

}  // namespace
}  // namespace tandem::test
