// The wire format of the server: parsing of requests, refusals that name the field, answers and
// chunks, splitting of thinking from the answer, metrics.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "http/api_error.h"
#include "http/request_reader.h"
#include "server/answer_json.h"
#include "server/generation_request.h"
#include "server/metrics.h"
#include "server/reasoning.h"
#include "server/service.h"

namespace tandem::test {
namespace {

using Json = nlohmann::ordered_json;

GenerationRequest completion(const std::string& text) {
  return parse_completion_request(Json::parse(text), {});
}
GenerationRequest chat(const std::string& more) {
  return parse_chat_request(
      Json::parse(R"({"messages": [{"role": "user", "content": "hi"}])" + more + "}"), {});
}

template <class Read>
std::string param_of(Read read, const std::string& text) {
  try {
    read(text);
  } catch (const ApiError& error) {
    EXPECT_EQ(error.status, 400);
    return error.param;
  }
  return "accepted";
}

TEST(GenerationRequest, DefaultsAreOpenAis) {
  const GenerationRequest r = completion(R"({"prompt": "x"})");
  EXPECT_EQ(r.max_tokens, 16);
  EXPECT_EQ(r.sampling.temperature, 1);
  EXPECT_EQ(r.sampling.top_p, 1);
  EXPECT_EQ(r.n, 1);
  EXPECT_FALSE(r.stream || r.has_seed || r.ignore_eos || r.wants_logprobs());
  EXPECT_TRUE(r.skip_special);
  EXPECT_FALSE(chat("").max_tokens.has_value());
}

TEST(GenerationRequest, TheModelsDefaultsHoldWhereNothingIsSaid) {
  const SamplingDefaults defaults = sampling_defaults(nlohmann::json::parse(
      R"({"temperature": 0.6, "top_p": 0.95, "top_k": "no", "repetition_penalty": -1})"));
  EXPECT_FLOAT_EQ(defaults.temperature, 0.6f);
  EXPECT_EQ(defaults.top_k, 0);
  EXPECT_EQ(defaults.repetition_penalty, 1);
  const Json request = Json::parse(R"({"prompt": "x", "temperature": 0.1})");
  const GenerationRequest r = parse_completion_request(request, defaults);
  EXPECT_FLOAT_EQ(r.sampling.temperature, 0.1f);
  EXPECT_FLOAT_EQ(r.sampling.top_p, 0.95f);
}

TEST(GenerationRequest, WhatTheBenchmarkSends) {
  const GenerationRequest r = completion(
      R"({"model": "m", "prompt": "x", "temperature": 0.0, "best_of": 1, "max_tokens": 9,
          "stream": true, "ignore_eos": true, "lora_path": null, "image_data": null})");
  EXPECT_TRUE(r.stream && r.ignore_eos);
  EXPECT_FALSE(r.skip_special) << "tokens of the end are counted by their text";
  EXPECT_EQ(r.max_tokens, 9);
}

TEST(GenerationRequest, EveryFormOfPrompt) {
  EXPECT_EQ(completion(R"({"prompt": "a"})").prompts.size(), 1);
  EXPECT_EQ(completion(R"({"prompt": ["a", "b"]})").prompts.size(), 2);
  const auto ids = completion(R"({"prompt": [1, 2.0, 3]})").prompts;
  ASSERT_EQ(ids.size(), 1);
  EXPECT_EQ(std::get<std::vector<int32_t>>(ids[0]), (std::vector<int32_t>{1, 2, 3}));
  EXPECT_EQ(completion(R"({"prompt": [[1], [2, 3]]})").prompts.size(), 2);
  for (const char* wrong : {"5", "{}", "[1, \"a\"]", "[[1], 2]", "[1.5]", "[-1]", "[[[1]]]"})
    EXPECT_EQ(param_of(completion, std::string(R"({"prompt": )") + wrong + "}"), "prompt") << wrong;
}

TEST(GenerationRequest, EveryNumberHasARange) {
  const std::pair<const char*, std::vector<const char*>> fields[] = {
      {"temperature", {"-0.1", "2.1", "\"1\"", "true", "[]"}},
      {"top_p", {"0", "1.01", "-1"}},
      {"top_k", {"-2", "1.5", "1e99"}},
      {"min_p", {"-0.1", "1.1"}},
      {"presence_penalty", {"-2.1", "2.1"}},
      {"frequency_penalty", {"3"}},
      {"repetition_penalty", {"0", "1000"}},
      {"n", {"0", "129", "0.5"}},
      {"max_tokens", {"0", "-1", "1e18"}},
      {"min_tokens", {"-1"}},
      {"seed", {"1.5", "\"a\"", "1e30"}},
      {"logit_bias", {"[]", "{\"a\": 1}", "{\"1\": 101}", "{\"-1\": 1}", "{\"1\": null}"}},
      {"stop", {"1", "[1]", "{}"}},
      {"stop_token_ids", {"1", "[\"a\"]", "[1.5]"}},
      {"ignore_eos", {"1", "\"yes\""}},
      {"stream", {"1"}},
      {"stream_options", {"[]", "true"}},
      {"timeout", {"-1", "\"1\""}}};
  for (const auto& [key, values] : fields)
    for (const char* value : values)
      EXPECT_NE(param_of(chat, fmt::format(", \"{}\": {}", key, value)), "accepted")
          << key << " " << value;
  EXPECT_EQ(param_of(chat, R"(, "temperature": 3)"), "temperature");
  EXPECT_EQ(param_of(completion, R"({"prompt": "a", "logprobs": 21})"), "logprobs");
  EXPECT_EQ(param_of(chat, R"(, "top_logprobs": 1)"), "top_logprobs");
}

TEST(GenerationRequest, WhatIsNotThereIsRefused) {
  EXPECT_EQ(param_of(chat, R"(, "tools": [])"), "accepted");
  EXPECT_EQ(param_of(chat, R"(, "response_format": {"type": "xml"})"), "response_format");
  EXPECT_EQ(param_of(chat, R"(, "response_format": {"type": "text"})"), "accepted");
  EXPECT_EQ(param_of(chat, R"(, "guided_grammar": "x")"), "guided_grammar");
  EXPECT_EQ(param_of(completion, R"({"prompt": "a", "max_tokens": 0})"), "max_tokens");
  EXPECT_EQ(param_of(completion, R"({"prompt": "a", "echo": true, "max_tokens": 0})"),
            "max_tokens");
  EXPECT_EQ(
      completion(R"({"prompt": "a", "echo": true, "logprobs": 0, "max_tokens": 0})").max_tokens, 0);
  EXPECT_EQ(param_of(completion, R"({"prompt": "a", "n": 2, "best_of": 3})"), "best_of");
}

TEST(GenerationRequest, EverySpellingOfAForm) {
  using Kind = ResponseFormat::Kind;
  const struct {
    const char* more;
    Kind kind;
    const char* field;
  } cases[] = {
      {R"("response_format": {"type": "json_object"})", Kind::kSchema, "response_format"},
      {R"("response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": true,
          "schema": {"type": "string"}}})",
       Kind::kSchema, "response_format.json_schema.schema"},
      {R"("response_format": {"type": "json_schema", "json_schema": {"name": "x"}})", Kind::kSchema,
       "response_format"},
      {R"("guided_json": {"type": "string"})", Kind::kSchema, "guided_json"},
      {R"("guided_json": "{\"type\": \"string\"}")", Kind::kSchema, "guided_json"},
      {R"("structured_outputs": {"json": {"type": "string"}})", Kind::kSchema,
       "structured_outputs.json"},
      {R"("structured_outputs": {"json_object": true})", Kind::kSchema,
       "structured_outputs.json_object"},
      {R"("guided_regex": "a+")", Kind::kPattern, "guided_regex"},
      {R"("regex": "a+")", Kind::kPattern, "regex"},
      {R"("structured_outputs": {"regex": "a+"})", Kind::kPattern, "structured_outputs.regex"},
      {R"("guided_choice": ["a", "b"])", Kind::kChoice, "guided_choice"},
      {R"("structured_outputs": {"choice": ["a", "b"]})", Kind::kChoice,
       "structured_outputs.choice"},
      {R"("response_format": null)", Kind::kText, ""},
  };
  for (const auto& c : cases) {
    const ResponseFormat form = chat(std::string(", ") + c.more).response_format;
    EXPECT_EQ(form.kind, c.kind) << c.more;
    EXPECT_EQ(form.field, c.field);
  }
  EXPECT_EQ(chat(R"(, "guided_json": "{\"type\": \"string\"}")").response_format.schema["type"],
            "string");
  const auto generate = [](const std::string& text) {
    return parse_generate_request(Json::parse(text), {});
  };
  EXPECT_EQ(
      generate(R"({"text": "x", "sampling_params": {"json_schema": "{}"}})").response_format.kind,
      Kind::kSchema);
  for (const char* wrong :
       {R"("response_format": 5)", R"("response_format": {"type": "json_schema"})",
        R"("response_format": {"type": "json_schema", "json_schema": {"schema": 5}})",
        R"("guided_json": 5)", R"("guided_json": "{")", R"("guided_choice": [])",
        R"("guided_choice": [""])", R"("guided_choice": [1])", R"("guided_regex": 5)",
        R"("structured_outputs": {"grammar": "x"})", R"("structured_outputs": [])",
        R"("guided_regex": "a", "guided_choice": ["a"])"})
    EXPECT_NE(param_of(chat, std::string(", ") + wrong), "accepted") << wrong;
}

TEST(GenerationRequest, CallsCanBeForced) {
  const std::string tools = R"(, "tools": [{"type": "function", "function": {"name": "f"}}])";
  EXPECT_FALSE(chat(tools).requires_tool_call);
  EXPECT_FALSE(chat(tools + R"(, "tool_choice": "auto")").requires_tool_call);
  const GenerationRequest any = chat(tools + R"(, "tool_choice": "required")");
  EXPECT_TRUE(any.requires_tool_call && any.required_tool.empty() && any.allows_parallel_calls);
  EXPECT_FALSE(chat(tools + R"(, "parallel_tool_calls": false)").allows_parallel_calls);
  const std::string named = R"(, "tool_choice": {"type": "function", "function": {"name": "f"}})";
  EXPECT_EQ(chat(tools + named).required_tool, "f");
  EXPECT_EQ(param_of(chat, named), "tool_choice") << "without tools";
  for (const char* wrong : {"\"always\"", "5", "{}", R"({"type": "function"})",
                            R"({"type": "function", "function": {"name": "g"}})"})
    EXPECT_NE(param_of(chat, tools + R"(, "tool_choice": )" + wrong), "accepted") << wrong;
}

TEST(GenerationRequest, FieldsOfAChat) {
  const GenerationRequest r =
      chat(R"(, "max_tokens": 5, "max_completion_tokens": 7, "logprobs": true,
      "top_logprobs": 2, "seed": -1, "stop": "x", "logit_bias": {"3": -100}, "unknown": 1)");
  EXPECT_EQ(r.max_tokens, 7);
  EXPECT_EQ(r.sampling.n_top_logprobs, 2);
  EXPECT_TRUE(r.has_seed);
  EXPECT_EQ(r.stops, std::vector<std::string>{"x"});
  EXPECT_EQ(r.sampling.logit_bias, (std::vector<std::pair<int32_t, float>>{{3, -100.0f}}));
}

Json messages_of(const std::string& messages) {
  return parse_chat_request({{"messages", Json::parse(messages)}}, {}).messages;
}

TEST(ChatMessages, AreReadAsOpenAisDescriptionHasThem) {
  const std::string call =
      R"({"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}})";
  const std::string calls = R"("tool_calls": [)" + call + "]";
  const std::pair<std::string, std::string> cases[] = {
      {R"({"role": "user", "content": "x", "name": "Ada"})",
       R"({"role":"user","content":"x","name":"Ada"})"},
      {R"({"role": "developer", "content": [{"type": "text", "text": "x", "cache_control": {}}]})",
       R"({"role":"developer","content":[{"type":"text","text":"x"}]})"},
      {R"({"role": "assistant", "content": null, )" + calls + "}",
       R"({"role":"assistant","content":null,"tool_calls":[{"id":"c","type":"function",)"
       R"("function":{"name":"f","arguments":"{}"}}]})"},
      {R"({"role": "assistant", )" + calls + "}",
       R"({"role":"assistant","content":null,"tool_calls":[{"id":"c","type":"function",)"
       R"("function":{"name":"f","arguments":"{}"}}]})"},
      {R"({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f",
           "arguments": {"a": 1}}}]})",
       R"({"role":"assistant","content":null,"tool_calls":[{"function":{"name":"f",)"
       R"("arguments":{"a":1}},"type":"function"}]})"},
      {R"({"role": "assistant", "content": "a", "name": null, "refusal": null, "audio": null,
           "function_call": null, "tool_calls": null})",
       R"({"role":"assistant","content":"a"})"},
      {R"({"role": "assistant", "content": "a", "tool_calls": []})",
       R"({"role":"assistant","content":"a"})"},
      {R"({"role": "assistant", "content": null, "refusal": "No."})",
       R"({"role":"assistant","content":"No."})"},
      {R"({"role": "assistant", "content": "a", "refusal": "No."})",
       R"({"role":"assistant","content":"a\nNo."})"},
      {R"({"role": "assistant", "content": [{"type": "text", "text": "a"},
                                            {"type": "refusal", "refusal": "No."}]})",
       R"({"role":"assistant","content":[{"type":"text","text":"a"},{"type":"text","text":"No."}]})"},
      {R"({"role": "assistant", "content": "a", "reasoning": "hm"})",
       R"({"role":"assistant","content":"a","reasoning":"hm","reasoning_content":"hm"})"},
      {R"({"role": "assistant", "reasoning": "so", "reasoning_content": "hm"})",
       R"({"role":"assistant","reasoning":"so","reasoning_content":"hm","content":""})"},
      {R"({"role": "assistant", "content": null, "reasoning_content": "hm"})",
       R"({"role":"assistant","reasoning_content":"hm","content":""})"},
      {R"({"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "3"}]})",
       R"({"role":"tool","tool_call_id":"c","content":[{"type":"text","text":"3"}]})"},
  };
  for (const auto& [given, wanted] : cases)
    EXPECT_EQ(messages_of("[" + given + "]").dump(), "[" + wanted + "]") << given;
}

TEST(ChatMessages, WrongOnesAreNamed) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"content": "x"})", "role"},
      {R"({"role": "", "content": "x"})", "role"},
      {R"({"role": "user"})", "content"},
      {R"({"role": "user", "content": null})", "content"},
      {R"({"role": "tool", "content": null})", "content"},
      {R"({"role": "assistant", "content": null})", "content"},
      {R"({"role": "assistant", "content": null, "tool_calls": []})", "content"},
      {R"({"role": "user", "content": 5})", "content"},
      {R"({"role": "user", "content": []})", "content"},
      {R"({"role": "user", "content": {"type": "text", "text": "x"}})", "content"},
      {R"({"role": "user", "content": [{"text": "x"}]})", "content[0].type"},
      {R"({"role": "user", "content": [{"type": "text"}]})", "content[0].text"},
      {R"({"role": "user", "content": [{"type": "text", "text": 1}]})", "content[0].text"},
      {R"({"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]})",
       "content[1].type"},
      {R"({"role": "user", "content": [{"type": "input_audio"}]})", "content[0].type"},
      {R"({"role": "user", "content": [{"type": "file"}]})", "content[0].type"},
      {R"({"role": "user", "content": [{"type": "refusal", "refusal": "x"}]})", "content[0].type"},
      {R"({"role": "user", "content": "x", "name": 5})", "name"},
      {R"({"role": "tool", "content": "x", "tool_call_id": 5})", "tool_call_id"},
      {R"({"role": "assistant", "refusal": 5})", "refusal"},
      {R"({"role": "assistant", "reasoning_content": 5})", "reasoning_content"},
      {R"({"role": "assistant", "reasoning": 5})", "reasoning"},
      {R"({"role": "assistant", "content": null, "audio": {"id": "x"}})", "audio"},
      {R"({"role": "assistant", "function_call": {"name": "f", "arguments": ""}})",
       "function_call"},
      {R"({"role": "assistant", "tool_calls": {}})", "tool_calls"},
      {R"({"role": "user", "content": "x",
           "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]})",
       "tool_calls"},
      {R"({"role": "assistant", "tool_calls": [{}]})", "tool_calls[0].function.name"},
      {R"({"role": "assistant", "tool_calls": [{"type": "custom"}]})", "tool_calls[0].type"},
      {R"({"role": "assistant", "tool_calls": [{"id": 1}]})", "tool_calls[0].id"},
      {R"({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]})",
       "tool_calls[0].function.arguments"},
  };
  for (const auto& [given, param] : cases)
    EXPECT_EQ(param_of(messages_of,
                       std::string("[{\"role\": \"user\", \"content\": \"\"}, ") + given + "]"),
              std::string("messages[1].") + param)
        << given;
  const auto message_of = [](const std::string& part) {
    try {
      messages_of(R"([{"role": "user", "content": [)" + part + "]}]");
    } catch (const ApiError& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_EQ(message_of(R"({"type": "image_url", "image_url": {"url": "x"}})"),
            "messages[0].content[0].type is \"image_url\": must be \"text\": this model reads text "
            "only");
}

TEST(ChatMessages, ThereIsABoundOnTheirNumber) {
  const auto many = [](size_t n) {
    const Json message = {{"role", "user"}, {"content", ""}};
    return "{\"messages\": " + Json(std::vector<Json>(n, message)).dump() + "}";
  };
  const auto read = [](const std::string& text) { parse_chat_request(Json::parse(text), {}); };
  EXPECT_EQ(param_of(read, many(16'384)), "accepted");
  EXPECT_EQ(param_of(read, many(16'385)), "messages");
}

constexpr AnswerInfo kChat{Endpoint::kChat, {}, {}, 5};
constexpr Usage kUsage{10, 4, 2};

TEST(AnswerJson, ErrorsAreNested) {
  EXPECT_EQ(error_json(ApiError(404, "no", "model", "model_not_found")).dump(),
            R"({"error":{"message":"no","type":"not_found_error","param":"model",)"
            R"("code":"model_not_found"}})");
  EXPECT_EQ(error_json(ApiError(400, "no")).at("error").at("param"), nullptr);
}

TEST(AnswerJson, ChunksAsTheirReadersExpect) {
  const AnswerInfo head{Endpoint::kCompletions, "cmpl-1", "m", 5};
  ChoicePart part;
  part.text = "hi";
  EXPECT_EQ(sse_event(chunk_json(head, part, {})),
            "data: {\"id\":\"cmpl-1\",\"object\":\"text_completion\",\"created\":5,\"model\":\"m\","
            "\"choices\":[{\"index\":0,\"text\":\"hi\",\"logprobs\":null,\"finish_reason\":null}]}"
            "\n\n");
  part.finish = FinishReason::kLength;
  const auto last = chunk_json(head, part, kUsage);
  EXPECT_EQ(last["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(last["usage"]["completion_tokens"], 4);
  EXPECT_EQ(last["usage"]["prompt_tokens_details"]["cached_tokens"], 2);
  EXPECT_TRUE(usage_chunk_json(head, kUsage)["choices"].empty());
}

TEST(AnswerJson, ChatDeltasSayOnlyWhatIsNew) {
  ChoicePart part;
  part.reasoning = "hm";
  auto delta = chunk_json(kChat, part, {})["choices"][0]["delta"];
  EXPECT_EQ(delta.dump(), R"({"reasoning_content":"hm","reasoning":"hm"})");
  part = {};
  part.finish = FinishReason::kStop;
  EXPECT_EQ(chunk_json(kChat, part, {})["choices"][0]["delta"].dump(), "{}");
  EXPECT_EQ(role_chunk_json(kChat, 1)["choices"][0]["delta"].dump(),
            R"({"role":"assistant","content":""})");
  EXPECT_EQ(chunk_json(kChat, part, {})["object"], "chat.completion.chunk");
  EXPECT_EQ(answer_json(kChat, {part}, kUsage)["object"], "chat.completion");
}

TEST(AnswerJson, TextThatIsNotUtf8IsReplaced) {
  EXPECT_EQ(dump_json({{"a", "\xff"}}), "{\"a\":\"\xEF\xBF\xBD\"}");
}

TEST(GenerationRequest, ToolsAreFunctions) {
  const std::string tool = R"({"type": "function", "function": {"name": "f", "parameters": {}}})";
  const GenerationRequest r = chat(fmt::format(R"(, "tools": [{}])", tool));
  EXPECT_EQ(r.tools.size(), 1);
  EXPECT_EQ(r.tools.dump(), Json::parse("[" + tool + "]").dump()) << "with its keys in order";
  EXPECT_FALSE(r.skip_special);
  EXPECT_TRUE(chat(fmt::format(R"(, "tools": [{}], "tool_choice": "none")", tool)).tools.is_null());
  for (const char* wrong : {"{}", "[5]", R"([{"type": "code"}])", R"([{"type": "function"}])",
                            R"([{"type": "function", "function": {"name": ""}}])"})
    EXPECT_NE(param_of(chat, fmt::format(R"(, "tools": {})", wrong)), "accepted") << wrong;
}

TEST(AnswerJson, CallsOfTools) {
  ChoicePart part;
  part.calls = {{"call_1", "f", "{\"a\": 1}"}};
  part.first_call = 2;
  part.has_tool_calls = true;
  part.finish = FinishReason::kStop;
  const auto choice = chunk_json(kChat, part, {})["choices"][0];
  EXPECT_EQ(choice["finish_reason"], "tool_calls");
  EXPECT_EQ(choice["delta"]["tool_calls"].dump(),
            R"([{"index":2,"id":"call_1","type":"function",)"
            R"("function":{"name":"f","arguments":"{\"a\": 1}"}}])");
  const auto whole = answer_json(kChat, {part}, kUsage)["choices"][0]["message"];
  EXPECT_EQ(whole["content"], nullptr);
  EXPECT_EQ(whole["tool_calls"][0]["function"]["name"], "f");
}

TEST(ToolCalls, EveryFormAtAnyCut) {
  struct Case {
    std::string text, content, calls;  // calls: id/name/arguments;
  };
  const Case cases[] = {
      {"Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n"
       "{\"a\": \"```\"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>put\n"
       "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
       "Let me see.", "/get/{\"a\": \"```\"};/put/{};"},
      {"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>{\"a\": 1}<｜tool▁call▁end｜>"
       "<｜tool▁calls▁end｜>",
       "", "/get/{\"a\": 1};"},
      {"<|tool_calls_section_begin|><|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>"
       "{\"a\": 1}<|tool_call_end|><|tool_calls_section_end|>",
       "", "functions.get:0/get/{\"a\": 1};"},
      {"a < b <｜tool▁calls", "a < b <｜tool▁calls", ""},
      {"x<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>{\"a", "x", "/get/{\"a;"},
      {"x<｜tool▁calls▁begin｜>", "x", ""},
      {"x<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>ge", "x", ""},
      {"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>", "", "/get/;"},
      {"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>{}<｜tool▁call", "",
       "/get/{};"},
      {"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>ge", "", ""},
      {"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n", "", "/get/;"},
      {"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```js", "", "/get/;"},
      {"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n{\"a\": "
       "\"```",
       "", "/get/{\"a\": \"```;"},
      {"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n{}\n``", "",
       "/get/{};"},
      {"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n{}\n```", "",
       "/get/{};"},
      {"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>{}<｜tool▁call▁end｜>\n"
       "<｜tool▁call▁begin｜>put<｜tool▁sep｜>{",
       "", "/get/{};/put/{;"},
      {"<|tool_calls_section_begin|><|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>"
       "{\"a\"",
       "", "functions.get:0/get/{\"a\";"},
      {"<|tool_calls_section_begin|><|tool_call_begin|>functions.ge", "", ""},
      {"<｜tool▁calls▁begin｜><｜tool▁call▁end｜><｜tool▁calls▁end｜>y", "y", ""},
      {"", "", ""},
  };
  for (const Case& c : cases) {
    for (size_t piece = 1; piece <= c.text.size() + 1; ++piece) {
      ToolCallParser parser;
      std::string content, calls;
      const auto take = [&](const ToolCallParser::Parts& parts) {
        content += parts.content;
        for (const ToolCall& call : parts.calls)
          calls += call.id + "/" + call.name + "/" + call.arguments + ";";
      };
      for (size_t at = 0; at < c.text.size(); at += piece)
        take(parser.push(std::string_view(c.text).substr(at, piece)));
      take(parser.flush());
      EXPECT_EQ(content, c.content) << c.text << " by " << piece;
      EXPECT_EQ(calls, c.calls) << c.text << " by " << piece;
    }
  }
}

// Both parts are the same however the text is split into pieces.
TEST(Reasoning, SplitsAtAnyCut) {
  struct Case {
    bool inside;
    std::string text, reasoning, content;
  };
  const Case cases[] = {
      {true, "\nLet me see.\n</think>\n\nYes.\n", "Let me see.", "Yes.\n"},
      {true, "a\n\nb < c </thin </think>d", "a\n\nb < c </thin ", "d"},
      {true, "never ends\n", "never ends\n", ""},
      {true, "</think>x", "", "x"},
      {false, "<think>\nhm\n</think>\n\nyes", "hm", "yes"},
      {false, "just <think> text </think>", "", "just <think> text </think>"},
      {false, "<thi", "", "<thi"},
      {false, "", "", ""},
  };
  for (const Case& c : cases) {
    for (size_t piece = 1; piece <= c.text.size() + 1; ++piece) {
      ReasoningSplitter splitter(c.inside);
      std::string reasoning, content;
      const auto take = [&](const ReasoningSplitter::Parts& parts) {
        reasoning += parts.reasoning;
        content += parts.content;
      };
      for (size_t at = 0; at < c.text.size(); at += piece)
        take(splitter.push(std::string_view(c.text).substr(at, piece)));
      take(splitter.flush());
      EXPECT_EQ(reasoning, c.reasoning) << c.text << " by " << piece;
      EXPECT_EQ(content, c.content) << c.text << " by " << piece;
    }
  }
}

// The request, or the refusal, when the bytes arrive in pieces of the given size.
std::string read_in_pieces(const std::string& bytes, size_t piece) {
  RequestReader reader(100);
  size_t there = 0, taken = 0;
  try {
    while (!reader.is_complete() && (there < bytes.size() || taken < there)) {
      const size_t n = reader.consume(std::string_view(bytes).substr(taken, there - taken));
      if (n == 0) there = std::min(there + piece, bytes.size());
      taken += n;
      if (n == 0 && taken == there) return "not complete";
    }
  } catch (const ApiError& error) {
    return fmt::format("{}: {}", error.status, error.what());
  }
  const ReceivedRequest r = reader.release();
  return fmt::format("{} {} key={} origin={} body={} keeps={} left={}", r.request.method,
                     r.request.path, r.request.authorization, r.request.cors.origin, r.request.body,
                     r.keep_alive, bytes.size() - taken);
}

TEST(RequestReader, TheSameAtAnyCut) {
  const std::string chunked =
      "POST /a?b HTTP/1.1\r\nHost: x\r\nAuthorization: k\r\nTransfer-Encoding: chunked\r\n\r\n"
      "3;x=y\r\nabc\r\n2\r\nde\r\n0\r\n";
  const std::pair<std::string, std::string> cases[] = {
      {"GET / HTTP/1.1\r\nHost: x\r\nOrigin: o\r\n\r\nGET /",
       "GET / key= origin=o body= keeps=true left=5"},
      {"POST / HTTP/1.0\r\nContent-Length: 3\r\n\r\nabcd",
       "POST / key= origin= body=abc keeps=false left=1"},
      // Each field of the header counts, and the wish to close more than the wish to keep.
      {"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nConnection: keep-alive\r\n\r\n",
       "GET / key= origin= body= keeps=false left=0"},
      {"GET / HTTP/1.0\r\nHost: x\r\nConnection: keep-alive\r\nConnection: te\r\n\r\n",
       "GET / key= origin= body= keeps=true left=0"},
      {chunked + "\r\nXY", "POST /a key=k origin= body=abcde keeps=true left=2"},
      // Trailers after a body do not become header fields.
      {chunked + "Authorization: other\r\nOrigin: o\r\nConnection: close\r\n\r\n",
       "POST /a key=k origin= body=abcde keeps=true left=0"}};
  for (const auto& [bytes, expected] : cases)
    for (const size_t piece : {1, 2, 3, 7, 1000}) EXPECT_EQ(read_in_pieces(bytes, piece), expected);
}

TEST(RequestReader, RefusalsAtAnyCut) {
  const std::pair<std::string, std::string> cases[] = {
      {"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 101\r\n\r\n",
       "413: the body is longer than 100 bytes"},
      {"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n65\r\n",
       "413: the body is longer"},
      {"GET / HTTP/1.1\r\nX: " + std::string(20000, 'y'),
       "431: the header section is longer than 16384"},
      {"GET / HTTP/1.1\r\n\r\n", "400: the request has 0 Host headers"},
      {"GET / HTTP/1.1\r\nHost: a, b\r\n\r\n", "400: the Host header is \"a, b\""},
      {"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n",
       "400: the Transfer-Encoding header is \"xchunked\""},
      {"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", "400: HTTP/1.0 does not have"},
      {"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1,1\r\n\r\na",
       "400: the Content-Length header is \"1,1\""},
      {"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\na",
       "400: the request has more than one"},
      {"GET / HTTP/2.0\r\n\r\n", "400: the request is not valid HTTP"}};
  for (const auto& [bytes, expected] : cases)
    for (const size_t piece : {1, 2, 7, 1000, 100000})
      EXPECT_EQ(read_in_pieces(bytes, piece).substr(0, expected.size()), expected) << piece;
}

class LoadingService : public testing::Test {
 protected:
  HttpResponse reply(const std::string& method, const std::string& path,
                     const std::string& key = {}, const std::string& body = {}) {
    return std::get<HttpResponse>(service_.handle({method, path, key, body}));
  }

  const Tokenizer tokenizer_ =
      Tokenizer::from_directory(std::string(TANDEM_SOURCE_DIR) + "/models/tiny-r1");
  Service service_{tokenizer_, nullptr, {}, {.model_id = "m", .root = "r", .api_key = "secret"}};
};

TEST_F(LoadingService, SaysHowFarItIs) {
  service_.set_loading(0.43);
  EXPECT_EQ(reply("GET", "/health").status, 503);
  EXPECT_EQ(reply("GET", "/health").body, R"({"status":"loading","loaded":0.43})");
  const HttpResponse refused =
      reply("POST", "/v1/completions", "Bearer secret", R"({"prompt": "x"})");
  EXPECT_EQ(refused.status, 503);
  EXPECT_GT(refused.retry_after_seconds, 0);
  EXPECT_NE(refused.body.find("43 %"), std::string::npos) << refused.body;
  EXPECT_NE(reply("GET", "/metrics").body.find("tandem:ready{model_name=\"m\",engine=\"0\"} 0"),
            std::string::npos);
  EXPECT_EQ(reply("POST", "/tokenize", "Bearer secret", R"({"prompt": "x"})").status, 200);
  service_.set_stopping();
  EXPECT_EQ(reply("GET", "/health").body, R"({"status":"stopping"})");
}

TEST_F(LoadingService, TheKeyGuardsWhatAsksTheModel) {
  for (const char* key : {"", "secret", "Bearer ", "Bearer secreT", "Bearer secret "}) {
    EXPECT_EQ(reply("GET", "/v1/models", key).status, 401) << key;
    EXPECT_EQ(reply("POST", "/v1/completions", key, "{}").status, 401) << key;
  }
  EXPECT_EQ(reply("GET", "/version").status, 200);
  EXPECT_EQ(reply("PUT", "/version").status, 405);
  EXPECT_EQ(reply("GET", "/none", "Bearer secret").status, 404);
  EXPECT_EQ(reply("POST", "/v1/completions", "Bearer secret", "{").status, 400);
}

TEST(Metrics, HistogramsAreCumulative) {
  const double bounds[] = {1, 2, 5};
  Histogram h(bounds);
  for (const double v : {0.5, 1.0, 3.0, 9.0}) h.add(v);
  EXPECT_EQ(h.text("x", "m=\"1\""),
            "x_bucket{m=\"1\",le=\"1\"} 2\nx_bucket{m=\"1\",le=\"2\"} 2\n"
            "x_bucket{m=\"1\",le=\"5\"} 3\nx_bucket{m=\"1\",le=\"+Inf\"} 4\n"
            "x_sum{m=\"1\"} 13.5\nx_count{m=\"1\"} 4\n");
}

TEST(Metrics, PrefillServers) {
  const OtherServers others = {{}, {{"a:1", true, 3, 1, 7, 64}, {"b:1", false, 0, 0, 0, 0}}};
  const EngineCounts counts;
  const std::string text = Metrics().text("m", &counts, nullptr, others);
  const auto line = [](const char* name, const char* address, int value) {
    return fmt::format(
        "tandem:prefill_server_{}{{model_name=\"m\",engine=\"0\",prefill_server=\"{}\"}} {}\n",
        name, address, value);
  };
  for (const std::string& expected :
       {line("up", "a:1", 1), line("up", "b:1", 0), line("fetches_total", "a:1", 3),
        line("failures_total", "a:1", 1), line("pages_total", "a:1", 7),
        line("pending_tokens", "a:1", 64)})
    EXPECT_NE(text.find(expected), std::string::npos) << expected << text;
  EXPECT_EQ(Metrics().text("m", &counts).find("prefill_server"), std::string::npos);
}

TEST(Metrics, NamesOfVllmAreThere) {
  Metrics metrics;
  metrics.finished({FinishReason::kStop, 10, 3, 0, 0.1, 0.2, 0.3});
  EngineCounts counts;
  counts.scheduler.n_pages = 10;
  counts.scheduler.n_available_pages = 5;
  counts.scheduler.n_host_pages = 8;
  counts.scheduler.n_free_host_pages = 2;
  counts.scheduler.n_swaps_in = 4;
  const std::string text = metrics.text("a\"b", &counts);
  for (const char* line : {"vllm:kv_cache_usage_perc{model_name=\"a\\\"b\",engine=\"0\"} 0.5\n",
                           "vllm:cpu_cache_usage_perc{model_name=\"a\\\"b\",engine=\"0\"} 0.75\n",
                           "swaps_total{model_name=\"a\\\"b\",engine=\"0\",direction=\"in\"} 4\n",
                           "vllm:request_success_total{model_name=\"a\\\"b\",engine=\"0\",finished_"
                           "reason=\"stop\"} 1\n",
                           "vllm:prompt_tokens_total{model_name=\"a\\\"b\",engine=\"0\"} 10\n",
                           "# TYPE vllm:time_to_first_token_seconds histogram\n"})
    EXPECT_NE(text.find(line), std::string::npos) << line;
}

}  // namespace
}  // namespace tandem::test
