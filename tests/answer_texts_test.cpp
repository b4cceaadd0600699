// What the server writes, word for word: metrics, answers, errors and headers; and the limits of
// the fields that it reads.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "http/api_error.h"
#include "http/cors.h"
#include "server/answer_json.h"
#include "server/generation_request.h"
#include "server/metrics.h"
#include "server/request_fields.h"
#include "server/response_format.h"
#include "tests/expected_text.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

// Every count differs from the others; each histogram has values of its own, on the bounds of
// buckets and beyond the last.
TEST(MetricsText, HasEveryCountInItsPlace) {
  Metrics metrics;
  for (const double s : {0.001, 0.03, 2560.0, 3000.0}) metrics.first_token(s);
  for (const double s : {0.01, 0.0101, 80.0, 81.0, 0.75}) metrics.next_token(s);
  metrics.finished({FinishReason::kStop, 1, 2, 0.3, 0.5, 0.8, 1.0});
  metrics.finished({FinishReason::kStop, 3, 100'000, 2.5, 15.0, 60.0, 7680.0});
  metrics.finished({FinishReason::kLength, 100'001, 50, 1.5, 2.0, 5.0, 8000.0});
  metrics.finished({FinishReason::kCancelled, 10, 0, 20, 30, 40, 50});
  metrics.finished({FinishReason::kCancelled, 10, 0, 20, 30, 40, 50});
  metrics.finished({FinishReason::kCancelled, 10, 0, 20, 30, 40, 50});
  for (int i = 0; i < 4; ++i) metrics.finished({FinishReason::kDeadline, 1, 1, 1, 1, 1, 1});
  for (int i = 0; i < 5; ++i) metrics.finished({FinishReason::kFailed, 0, 0, 0, 0, 0, 0});
  for (const int status : {200, 404, 200, 503, 200, 404}) metrics.http_response(status);
  EngineCounts counts;
  counts.scheduler = {.n_running = 3,
                      .n_waiting = 5,
                      .n_pages = 40,
                      .n_available_pages = 30,
                      .n_host_pages = 16,
                      .n_free_host_pages = 4,
                      .n_swapped = 7,
                      .n_preemptions = 11,
                      .n_swaps_out = 13,
                      .n_swaps_in = 12,
                      .n_prompt_tokens = 1'000'000'000'000,
                      .n_cached_tokens = 17};
  counts.n_steps = 150;
  counts.n_computed_tokens = 5'000'000'000;
  counts.n_generated_tokens = 4'000'000'000;
  counts.n_fetched_tokens = 29;
  counts.scheduler.n_drafted_tokens = 23;
  counts.scheduler.n_accepted_tokens = 19;
  for (int i = 0; i < EngineCounts::kStepSizes; ++i) counts.steps_of[i] = i + 1;
  expect_text("server/metrics.txt", metrics.text("a\\b\"c\nd", &counts));
  expect_text("server/metrics_while_loading.txt", Metrics().text("m", nullptr));
}

TEST(MetricsText, NoHostPagesAreNotInUse) {
  EngineCounts counts;
  counts.scheduler.n_pages = 1;
  counts.scheduler.n_available_pages = 1;
  const std::string text = Metrics().text("m", &counts);
  EXPECT_NE(text.find("\nvllm:cpu_cache_usage_perc{model_name=\"m\",engine=\"0\"} 0\n"),
            std::string::npos);
  EXPECT_NE(text.find("\nvllm:kv_cache_usage_perc{model_name=\"m\",engine=\"0\"} 0\n"),
            std::string::npos);
}

constexpr AnswerInfo kCompletion{Endpoint::kCompletions, {}, {}, 5};
constexpr AnswerInfo kChat{Endpoint::kChat, {}, {}, 6};

ChoicePart part_with_tokens() {
  ChoicePart part;
  part.index = 1;
  part.text = "äb";
  part.wants_logprobs = true;
  part.text_offset = 7;
  part.tokens = {{{"x", "x", {}}, {}, 3},
                 {{"ä", "\xc3\xa4", -0.5f}, {{"ä", "\xc3\xa4", -0.5f}, {"o", "o", -1.25f}}, 1},
                 {{"b", "b", -2.0f}, {}, 1}};
  return part;
}

TEST(AnswerTexts, CompletionsWithLogprobs) {
  EXPECT_EQ(answer_json(kCompletion, {part_with_tokens()}, {10, 4, 3}).dump(),
            R"({"id":"","object":"text_completion","created":5,"model":"","choices":[{"index":1,)"
            R"("text":"äb","logprobs":{"text_offset":[7,10,11],"token_logprobs":[null,-0.5,-2.0],)"
            R"("tokens":["x","ä","b"],"top_logprobs":[null,{"ä":-0.5,"o":-1.25},{"b":-2.0}]},)"
            R"("finish_reason":null}],"usage":{"prompt_tokens":10,"completion_tokens":4,)"
            R"("total_tokens":14,"prompt_tokens_details":{"cached_tokens":3}}})");
}

TEST(AnswerTexts, ChatsWithLogprobs) {
  ChoicePart part = part_with_tokens();
  part.tokens.erase(part.tokens.begin());
  part.reasoning = "hm";
  part.finish = FinishReason::kLength;
  part.calls = {{"c1", "f", "{}"}, {"c2", "g", "{\"a\":1}"}};
  part.first_call = 3;
  const std::string logprobs =
      R"("logprobs":{"content":[{"token":"ä","logprob":-0.5,"bytes":[195,164],"top_logprobs":)"
      R"([{"token":"ä","logprob":-0.5,"bytes":[195,164]},{"token":"o","logprob":-1.25,)"
      R"("bytes":[111]}]},{"token":"b","logprob":-2.0,"bytes":[98],"top_logprobs":[]}]},)"
      R"("finish_reason":"length"}])";
  EXPECT_EQ(
      answer_json(kChat, {part}, {1, 2, 0})["choices"].dump(),
      R"([{"index":1,"message":{"role":"assistant","content":"äb","reasoning_content":"hm","reasoning":"hm",)"
      R"("tool_calls":[{"id":"c1","type":"function","function":{"name":"f",)"
      R"("arguments":"{}"}},{"id":"c2","type":"function","function":{"name":"g",)"
      R"("arguments":"{\"a\":1}"}}]},)" +
          logprobs);
  EXPECT_EQ(chunk_json(kChat, part, {})["choices"].dump(),
            R"([{"index":1,"delta":{"reasoning_content":"hm","reasoning":"hm","content":"äb",)"
            R"("tool_calls":[{"index":3,"id":"c1","type":"function","function":{"name":"f",)"
            R"("arguments":"{}"}},{"index":4,"id":"c2","type":"function","function":{"name":"g",)"
            R"("arguments":"{\"a\":1}"}}]},)" +
                logprobs);
  EXPECT_EQ(role_chunk_json(kChat, 2).dump(),
            R"({"id":"","object":"chat.completion.chunk","created":6,"model":"","choices":)"
            R"([{"index":2,"delta":{"role":"assistant","content":""},"logprobs":null,)"
            R"("finish_reason":null}]})");
  EXPECT_EQ(usage_chunk_json(kChat, {1, 2, 0}).dump(),
            R"({"id":"","object":"chat.completion.chunk","created":6,"model":"","choices":[],)"
            R"("usage":{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3,)"
            R"("prompt_tokens_details":{"cached_tokens":0}}})");
  EXPECT_FALSE(chunk_json(kChat, part, {}).contains("usage"));
  ChoicePart calls;
  calls.has_tool_calls = true;
  for (const auto& [reason, wanted] : {std::pair{FinishReason::kStop, "tool_calls"},
                                       std::pair{FinishReason::kLength, "length"},
                                       {FinishReason::kCancelled, "abort"},
                                       {FinishReason::kDeadline, "abort"},
                                       {FinishReason::kFailed, "abort"}}) {
    calls.finish = reason;
    EXPECT_EQ(chunk_json(kChat, calls, {})["choices"][0]["finish_reason"], wanted);
  }
}

TEST(AnswerTexts, GenerateAndModels) {
  ChoicePart all;
  all.text = "t";
  const AnswerInfo info{Endpoint::kGenerate, "g", "m", 1};
  const std::string begin = R"({"text":"t","meta_info":{"id":"g","finish_reason":)",
                    end = R"(,"prompt_tokens":3,"completion_tokens":4,"cached_tokens":2}})";
  EXPECT_EQ(generate_json(info, all, {3, 4, 2}).dump(), begin + "null" + end);
  all.finish = FinishReason::kStop;
  EXPECT_EQ(generate_json(info, all, {3, 4, 2}).dump(), begin + R"({"type":"stop"})" + end);
  all.finish = FinishReason::kLength;
  EXPECT_EQ(generate_json(info, all, {3, 4, 2}).dump(),
            begin + R"({"type":"length","length":4})" + end);
  EXPECT_EQ(models_json("i", "r", 8, 9, "", "").dump(),
            R"({"object":"list","data":[{"id":"i","object":"model","created":9,)"
            R"("owned_by":"tandem","root":"r","parent":null,"max_model_len":8}]})");
  EXPECT_EQ(models_json("i", "r", 8, 9, "", "x:32")["data"][0]["simulated_routing"], "x:32");
  EXPECT_EQ(models_json("i", "r", 8, 9, "decode", "")["data"][0]["role"], "decode");
}

TEST(AnswerTexts, ErrorsHaveTheTypeOfTheirStatus) {
  for (const auto& [status, type] : {std::pair{400, "invalid_request_error"},
                                     std::pair{401, "authentication_error"},
                                     {403, "invalid_request_error"},
                                     {404, "not_found_error"},
                                     {499, "invalid_request_error"},
                                     {500, "server_error"},
                                     {503, "server_error"}})
    EXPECT_EQ(error_json(ApiError(status, "m")).dump(), R"({"error":{"message":"m","type":")" +
                                                            std::string(type) +
                                                            R"(","param":null,"code":null}})");
}

TEST(Cors, NamesTheOriginThatIsAllowed) {
  const std::string rest =
      "Access-Control-Allow-Methods: GET, POST\r\n"
      "Access-Control-Allow-Headers: *, Authorization\r\nAccess-Control-Max-Age: 600\r\n";
  const std::string any = "Access-Control-Allow-Origin: *\r\n",
                    one = "Access-Control-Allow-Origin: http://a\r\nVary: Origin\r\n";
  EXPECT_EQ(cors_headers({"*"}, {"", "GET"}), "");
  EXPECT_EQ(cors_headers({}, {"http://a", "GET"}), "");
  EXPECT_EQ(cors_headers({"http://b"}, {"http://a", "GET"}), "");
  EXPECT_EQ(cors_headers({"http://b", "http://a"}, {"http://a", ""}), one);
  EXPECT_EQ(cors_headers({"http://a"}, {"http://a", "POST"}), one + rest);
  EXPECT_EQ(cors_headers({"http://a", "*"}, {"http://c", ""}), any);
  EXPECT_EQ(cors_headers({"*"}, {"http://c", "POST"}), any + rest);
}

// What a field is refused with, or "accepted".
std::string refusal(const std::function<void()>& read) {
  try {
    read();
  } catch (const ApiError& error) {
    EXPECT_EQ(error.status, 400);
    return std::string(error.what()) + " [" + error.param + "]";
  }
  return "accepted";
}

TEST(RequestFields, HaveLimits) {
  const Json request = Json::parse(
      R"({"i": 5, "w": 5.0, "r": 5.5, "big": 1e16, "e15": 1e15, "max": 9223372036854775807,
          "more": 9223372036854775808, "low": -3, "n": null, "s": "x", "b": true,
          "l": ["a", "b"], "mixed": ["a", 1], "ids": [0, 2147483647, 3.0], "o": {"k": 1}})");
  const RequestFields f(request, "p.");
  EXPECT_EQ(f.integer("i", 5, 5, 0), 5);
  EXPECT_EQ(f.integer("w", 5, 5, 0), 5);
  EXPECT_EQ(f.integer("low", -3, 0, 0), -3);
  EXPECT_EQ(f.integer("e15", 0, int64_t{1} << 60, 0), 1'000'000'000'000'000);
  EXPECT_EQ(f.integer("max", 0, INT64_MAX, 0), INT64_MAX);
  EXPECT_EQ(f.integer("n", 0, 9, 4), 4);
  EXPECT_FALSE(f.integer("n", 0, 9));
  EXPECT_EQ(f.number("r", 5.5, 5.5, 0), 5.5);
  EXPECT_EQ(f.number("missing", 0, 1, 0.25), 0.25);
  EXPECT_TRUE(f.boolean("b", false));
  EXPECT_TRUE(f.boolean("n", true));
  EXPECT_EQ(f.string("s", "d"), "x");
  EXPECT_EQ(f.string("n", "d"), "d");
  EXPECT_EQ(f.strings("s", 0), std::vector<std::string>{"x"});
  EXPECT_EQ(f.strings("l", 2), (std::vector<std::string>{"a", "b"}));
  EXPECT_TRUE(f.strings("n", 2).empty());
  EXPECT_EQ(f.ids("ids"), (std::vector<int32_t>{0, 2147483647, 3}));
  EXPECT_EQ(f.object("o").integer("k", 0, 9, 0), 1);
  EXPECT_EQ(f.object("n").find("k"), nullptr);
  const std::pair<std::function<void()>, const char*> cases[] = {
      {[&] { f.integer("i", 6, 9); }, "p.i is 5: must be an integer between 6 and 9 [p.i]"},
      {[&] { f.integer("i", 0, 4); }, "p.i is 5: must be an integer between 0 and 4 [p.i]"},
      {[&] { f.integer("r", 0, 9); }, "p.r is 5.5: must be an integer between 0 and 9 [p.r]"},
      {[&] { f.integer("big", 0, INT64_MAX); },
       "p.big is 1e+16: must be an integer between 0 and 9223372036854775807 [p.big]"},
      {[&] { f.integer("more", 0, INT64_MAX); },
       "p.more is 9223372036854775808: must be an integer between 0 and 9223372036854775807 "
       "[p.more]"},
      {[&] { f.number("r", 0, 5.25, 0); }, "p.r is 5.5: must be a number between 0 and 5.25 [p.r]"},
      {[&] { f.number("r", 5.75, 6, 0); }, "p.r is 5.5: must be a number between 5.75 and 6 [p.r]"},
      {[&] { f.number("s", 0, 1, 0); }, "p.s is \"x\": must be a number between 0 and 1 [p.s]"},
      {[&] { f.boolean("i", true); }, "p.i is 5: must be true or false [p.i]"},
      {[&] { f.string("i", ""); }, "p.i is 5: must be a string [p.i]"},
      {[&] { f.strings("l", 1); },
       "p.l is [\"a\",\"b\"]: must be a string or a list of at most 1 strings [p.l]"},
      {[&] { f.strings("mixed", 2); },
       "p.mixed is [\"a\",1]: must be a string or a list of at most 2 strings [p.mixed]"},
      {[&] { f.ids("l"); }, "p.l is [\"a\",\"b\"]: must be a list of token ids [p.l]"},
      {[&] { f.ids("i"); }, "p.i is 5: must be a list of token ids [p.i]"},
      {[&] { f.object("o").string("k", ""); }, "p.o.k is 1: must be a string [p.o.k]"},
      {[&] { f.object("i"); }, "p.i is 5: must be an object [p.i]"},
      {[&] { f.refuse("missing", "there"); }, "p.missing is missing: must be there [p.missing]"}};
  for (const auto& [read, wanted] : cases) EXPECT_EQ(refusal(read), wanted);
  const Json list = Json::array();
  EXPECT_EQ(refusal([&] { RequestFields{list}; }), "the request is []: must be an object []");
  EXPECT_EQ(as_token_id(2147483647), 2147483647);
  EXPECT_FALSE(as_token_id(2147483648));
  EXPECT_FALSE(as_token_id(-1));
  EXPECT_FALSE(as_token_id("1"));
}

TEST(ResponseFormat, NamesWhatItRefuses) {
  const auto read = [](const std::string& text) {
    const Json request = Json::parse(text);
    return refusal([&] { read_response_format(RequestFields(request)); });
  };
  const auto choices = [](int n) {
    Json list = Json::array();
    for (int i = 0; i < n; ++i) list.push_back("c");
    return Json({{"guided_choice", list}}).dump();
  };
  EXPECT_EQ(read(choices(1000)), "accepted");
  EXPECT_NE(read(choices(1001)), "accepted");
  EXPECT_EQ(read(R"({"guided_grammar": "x"})"), "guided_grammar is not supported [guided_grammar]");
  EXPECT_EQ(read(R"({"ebnf": "x"})"), "ebnf is not supported [ebnf]");
  EXPECT_EQ(read(R"({"structured_outputs": {"structural_tag": 1}})"),
            "structured_outputs.structural_tag is not supported "
            "[structured_outputs.structural_tag]");
  EXPECT_EQ(read(R"({"response_format": {"type": "x"}})"),
            "response_format \"x\" is not supported [response_format]");
  EXPECT_EQ(read(R"({"response_format": {"type": "json_schema"}})"),
            "response_format.json_schema is missing: must be an object with a schema "
            "[response_format.json_schema]");
  EXPECT_EQ(read(R"({"guided_choice": ["a", ""]})"),
            "guided_choice is [\"a\",\"\"]: must be a list of strings, none of them empty "
            "[guided_choice]");
  EXPECT_EQ(read(R"({"regex": "a", "structured_outputs": {"choice": ["b"]}})"),
            "regex and structured_outputs.choice are both given: only one format is possible "
            "[structured_outputs.choice]");
}

// Each field with values at its limits, beyond them and of other types, in the request of each
// endpoint: accepted, or refused with these words.
TEST(GenerationRequests, HaveLimits) {
  using Parse = GenerationRequest (*)(const Json&, const SamplingDefaults&);
  struct Asked {
    const char* name;
    Parse parse;
    Json base;
    const char* inside;  // the object that has the fields; empty: the request
  };
  const Asked endpoints[] = {
      {"completions", parse_completion_request, {{"prompt", "x"}}, ""},
      {"chat", parse_chat_request, {{"messages", {{{"role", "user"}, {"content", "x"}}}}}, ""},
      {"generate", parse_generate_request, {{"text", "x"}}, "sampling_params"},
      {"generate itself", parse_generate_request, {{"text", "x"}}, ""}};
  const auto list = [](size_t n, const Json& item) { return Json(std::vector<Json>(n, item)); };
  const Json empty = Json::object(), one = {{"type", "function"}, {"function", {{"name", "f"}}}};
  const std::pair<const char*, std::vector<Json>> fields[] = {
      {"temperature", {0, -0.01, 2, 2.01, "1", nullptr}},
      {"top_p", {0, 1e-9, -0.01, 1, 1.01}},
      {"top_k", {-2, -1, 0, 1 << 30, (1 << 30) + 1, 1.5}},
      {"min_p", {-0.01, 0, 1, 1.01}},
      {"repetition_penalty", {0.009, 0.01, 100, 100.1}},
      {"presence_penalty", {-2.01, -2, 2, 2.01}},
      {"frequency_penalty", {-2.01, -2, 2, 2.01}},
      {"seed", {INT64_MIN, -1, UINT64_MAX, 0.5}},
      {"logit_bias",
       {empty,
        {{"0", -100}},
        {{"0", 100}},
        {{"0", 100.1}},
        {{"0", -100.1}},
        {{"-1", 1}},
        {{"1x", 1}},
        {{"", 1}},
        {{"0", "1"}},
        Json::array()}},
      {"n", {0, 1, 2, 128, 129}},
      {"best_of", {0, 1, 2, 129}},
      {"stop", {"", list(16, "s"), list(17, "s"), 1, list(1, 1)}},
      {"stop_token_ids", {list(2, 0), list(1, -1), 5}},
      {"ignore_eos", {true, 1}},
      {"skip_special_tokens", {false, 0}},
      {"include_stop_str_in_output", {true, 0}},
      {"no_stop_trim", {true, 0}},
      {"min_tokens", {-1, 0, 1 << 30, (1 << 30) + 1}},
      {"min_new_tokens", {-1, 0, 1 << 30, (1 << 30) + 1}},
      {"model", {"m", 1}},
      {"stream", {true, 1}},
      {"stream_options",
       {empty,
        {{"include_usage", 1}},
        {{"continuous_usage_stats", 1}},
        {{"include_usage", true}},
        1}},
      {"echo", {true, 1}},
      {"max_tokens", {-1, 0, 1, 1 << 30, (1 << 30) + 1}},
      {"max_new_tokens", {0, 1, 1 << 30, (1 << 30) + 1}},
      {"max_completion_tokens", {0, 1, 1 << 30, (1 << 30) + 1}},
      {"timeout", {-0.1, 0, 1e6, 1.1e6}},
      {"logprobs", {-1, 0, 20, 21, true}},
      {"top_logprobs", {-1, 0, 1, 20, 21}},
      {"suffix", {"", "x", 1}},
      {"add_special_tokens", {true, 1}},
      {"prompt",
       {"",
        list(1024, "a"),
        list(1025, "a"),
        list(2, 1),
        list(1, list(2, 1)),
        {1, "a"},
        {"a", 1},
        empty,
        Json::array(),
        {1.5}}},
      {"chat_template_kwargs", {empty, 1}},
      {"add_generation_prompt", {false, 1}},
      {"separate_reasoning", {false, 1}},
      {"parallel_tool_calls", {false, 1}},
      {"tools",
       {Json::array(), 1, list(1, one), list(1, 1), list(1, {{"type", "code"}}),
        list(1, {{"type", "function"}, {"function", {{"name", ""}}}}),
        list(1, {{"type", "function"}, {"function", {{"name", "f"}, {"parameters", 1}}}})}},
      {"tool_choice", {"auto", "none", "required", "any", one, empty, 1}},
      {"return_logprob", {false, true, 1}},
      {"input_ids", {list(2, 1), 1, list(1, -1)}},
      {"text", {"", 1}}};
  std::string text;
  for (const Asked& asked : endpoints)
    for (const auto& [key, values] : fields)
      for (const Json& value : values) {
        Json request = asked.base;
        (*asked.inside ? request[asked.inside] : request)[key] = value;
        std::string shown = value.dump();
        if (shown.size() > 70) shown = shown.substr(0, 66) + " ..";
        text += fmt::format("{} {} {}: {}\n", asked.name, key, shown,
                            refusal([&] { asked.parse(request, {}); }));
      }
  expect_text("server/refused_fields.txt", text);
}

// If several fields are wrong, the error names the first of this list; each is removed in turn.
TEST(GenerationRequests, NameTheFirstWrongField) {
  Json wrong = Json::parse(R"({"model": 1, "stream": 1, "stream_options": 1, "echo": 1,
      "max_tokens": -1, "timeout": -1, "response_format": 1, "temperature": 3, "top_p": 2,
      "top_k": -3, "min_p": 2, "repetition_penalty": 0, "presence_penalty": 3,
      "frequency_penalty": 3, "seed": "x", "logit_bias": 1, "n": 0, "stop": 1,
      "stop_token_ids": 1, "ignore_eos": 1, "skip_special_tokens": 1,
      "include_stop_str_in_output": 1, "min_tokens": -1, "min_new_tokens": -1, "messages": 1,
      "chat_template_kwargs": 1, "add_generation_prompt": 1, "max_completion_tokens": 0,
      "top_logprobs": -1, "logprobs": 1.5, "separate_reasoning": 1, "parallel_tool_calls": 1,
      "tools": 1, "tool_choice": 1, "prompt": 1, "add_special_tokens": 1, "suffix": "x",
      "best_of": 2})");
  const auto in_order = [](Json request, const std::function<void(const Json&)>& parse) {
    std::string order;
    for (size_t i = 0; i < 60; ++i) {
      try {
        parse(request);
        return order;
      } catch (const ApiError& error) {
        const std::string key = error.param.substr(0, error.param.find('.'));
        order += key + " ";
        if (key == "messages")
          request[key] = {{{"role", "user"}, {"content", "x"}}};
        else if (key == "prompt")
          request[key] = "x";
        else
          EXPECT_EQ(request.erase(key), 1u) << error.what();
      }
    }
    return order;
  };
  const auto completion = [](const Json& r) { parse_completion_request(r, {}); };
  const auto chat = [](const Json& r) { parse_chat_request(r, {}); };
  const std::string both =
      "temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty seed "
      "logit_bias n stop stop_token_ids ignore_eos skip_special_tokens include_stop_str_in_output "
      "min_tokens min_new_tokens ";
  EXPECT_EQ(in_order(wrong, completion),
            "model stream stream_options echo max_tokens timeout response_format " + both +
                "prompt add_special_tokens logprobs suffix best_of ");
  EXPECT_EQ(in_order(wrong, chat),
            "model stream stream_options max_tokens timeout response_format " + both +
                "messages chat_template_kwargs add_generation_prompt max_completion_tokens "
                "top_logprobs logprobs separate_reasoning parallel_tool_calls tools tool_choice ");
}

}  // namespace
}  // namespace tandem
