// `tandem bench serving`: random numbers and requests against Python's and numpy's, parsing of
// answers, metrics, and the bytes of the report. tests/serving_bench_test.py runs the program.
#include "bench/serving/serving_bench.h"

#include <gtest/gtest.h>

#include <cmath>

#include "bench/serving/dataset.h"
#include "core/check.h"
#include "tests/error_of.h"
#include "tests/repository.h"
#include "tests/temp_directory.h"

namespace tandem {
namespace {

using test::kTinyR1;

// Expected values from Python 3.11 and numpy 2.4.6.
TEST(PythonRandom, ShufflesAsPythonDoes) {
  const std::vector<std::pair<uint32_t, std::vector<int>>> orders = {
      {0, {2, 14, 3, 16, 10, 1, 9, 5, 11, 15, 6, 7, 8, 4, 0, 13, 12}},
      {1, {10, 5, 15, 14, 9, 0, 8, 13, 3, 6, 11, 12, 7, 1, 16, 2, 4}},
      {42, {7, 10, 5, 6, 15, 14, 13, 9, 8, 1, 2, 12, 16, 4, 11, 0, 3}},
      {4294967295, {7, 13, 2, 1, 0, 11, 3, 10, 12, 15, 5, 14, 4, 8, 9, 16, 6}}};
  const auto ascending = [](int n) {
    std::vector<int> items(static_cast<size_t>(n));
    for (int i = 0; i < n; ++i) items[static_cast<size_t>(i)] = i;
    return items;
  };
  for (const auto& [seed, wanted] : orders) {
    PythonRandom random(seed);
    std::vector<int> items = ascending(17);
    random.shuffle(items);
    EXPECT_EQ(items, wanted) << seed;
  }
  PythonRandom random(42);  // uses more than the first 624 words of the generator
  std::vector<int> small = ascending(17), large = ascending(3000);
  random.shuffle(small);
  random.shuffle(large);
  large.resize(5);
  EXPECT_EQ(large, (std::vector<int>{1842, 1304, 1128, 599, 1122}));
}

TEST(NumpyRandom, DrawsAsNumpyDoes) {
  struct Case {
    uint32_t seed;
    std::vector<int> lengths, short_lengths, offsets;
    std::vector<double> gaps;
  };
  const std::vector<Case> cases = {
      {1,
       {38, 236, 909, 73, 768, 906},
       {79, 71, 25, 20, 101, 50},
       {92740, 31959, 90071, 19433},
       {0x1.206ec916001a2p-3, 0x1.6644ed9c7c3c2p-1, 0x1.81bfca91d15eap-2, 0x1.4238abbf9eb21p-2}},
      {42,
       {103, 436, 861, 271, 107, 72},
       {20, 102, 121, 74, 87, 116},
       {44131, 60263, 16023, 41090},
       {0x1.54c69ee8afd38p-8, 0x1.c0749243bb0b5p-1, 0x1.c953725151090p-2, 0x1.e8d50ec33ba92p-5}},
      {4294967295,
       {420, 291, 13, 72, 949, 577},
       {32, 127, 123, 107, 11, 27},
       {23693, 108982, 120119, 37590},
       {0x1.11d8a9c4b0998p-3, 0x1.91436bf28cfd5p-4, 0x1.9ad8ac50c182ep-5, 0x1.5b040c3c9d3f0p-1}}};
  for (const Case& c : cases) {
    NumpyRandom random(c.seed);
    EXPECT_EQ(random.integers(1, 1025, 6), c.lengths) << c.seed;
    EXPECT_EQ(random.integers(0, 129, 6), c.short_lengths) << c.seed;
    EXPECT_EQ(random.integers(5, 6, 3), (std::vector<int>{5, 5, 5}));  // consumes no random numbers
    EXPECT_EQ(random.integers(0, 128000, 4), c.offsets) << c.seed;
    for (const double gap : c.gaps) EXPECT_DOUBLE_EQ(random.exponential(1 / 4.0), gap) << c.seed;
  }
}

TEST(ShareGpt, ReadsTheFirstTwoTurns) {
  const TempFile file(R"([
    {"id": "a", "conversations": [{"from": "human", "value": "1"}, {"value": "2"}, {"value": "3"}]},
    {"conversations": [{"value": "alone"}]},
    {"tags": [{"value": "no"}, {"value": "no"}], "meta": {"value": [1.5, null, true]}, "conversation":
      [{"value": "ä", "more": {"value": "no"}}, {"value": "\n"}]},
    {"conversations": []}, {}])");
  using Pairs = std::vector<std::pair<std::string, std::string>>;
  EXPECT_EQ(read_sharegpt(file.path()), (Pairs{{"1", "2"}, {"ä", "\n"}}));
}

TEST(ShareGpt, RefusesOtherFiles) {
  for (const char* text : {"{}", "3", "[", "[{\"conversations\": [{\"value\": 1}, {}]}]"}) {
    const TempFile file(text);
    EXPECT_NE(error_of([&] { read_sharegpt(file.path()); }).find(file.path()), std::string::npos)
        << text;
  }
  EXPECT_NE(error_of([] { read_sharegpt("/no/such.json"); }), "no error");
}

// The requests of --seed 42.
std::vector<ServingRequest> requests_of(const DatasetOptions& options) {
  const Tokenizer tokenizer = Tokenizer::from_directory(kTinyR1);
  PythonRandom python(42);
  NumpyRandom numpy(42);
  return make_dataset(options, tokenizer, base_tokens(kTinyR1, tokenizer), python, numpy);
}

// Expected values from sglang.benchmark.serving 0.5.23; the second case shows that answers have at
// least one token.
TEST(Dataset, RandomIdsHasTheOriginalsLengths) {
  struct Case {
    int n_prompts, input_tokens, output_tokens;
    double range_ratio;
    std::vector<int> inputs, outputs, first_ids;
  };
  const Case cases[] = {
      {5, 20, 12, 0.3, {12, 9, 18, 20, 16}, {10, 7, 9, 12, 5}, {214, 331, 460, 90, 376}},
      {8,
       3,
       2,
       0,
       {3, 1, 3, 3, 1, 1, 3, 2},
       {1, 1, 1, 1, 2, 1, 2, 2},
       {151, 131, 151, 311, 261, 348, 2, 420}}};
  for (const Case& c : cases) {
    DatasetOptions options;
    options.name = "random-ids";
    options.n_prompts = c.n_prompts;
    options.input_tokens = c.input_tokens;
    options.output_tokens = c.output_tokens;
    options.range_ratio = c.range_ratio;
    options.sends_ids = true;
    std::vector<int> inputs, outputs, first_ids;
    for (const ServingRequest& request : requests_of(options)) {
      EXPECT_EQ(request.ids.size(), static_cast<size_t>(request.prompt_tokens));
      inputs.push_back(request.prompt_tokens);
      outputs.push_back(request.output_tokens);
      first_ids.push_back(request.ids.at(0));
    }
    EXPECT_EQ(inputs, c.inputs);
    EXPECT_EQ(outputs, c.outputs);
    EXPECT_EQ(first_ids, c.first_ids);
  }
}

// Expected values from sglang.benchmark.serving 0.5.23 with transformers 5.19, whose tokenizer for
// this model adds no beginning-of-sentence token.
TEST(Dataset, ConversationsAreTheOriginals) {
  nlohmann::json conversations = nlohmann::json::array();
  for (int i = 0; i < 5; ++i) {
    const std::string sum = std::to_string(i + 12);
    const nlohmann::json first = {{"value", "What is " + std::to_string(i) + " + 12?"}},
                         second = {{"value", sum + sum + sum}};
    conversations.push_back({{"conversations", nlohmann::json::array({first, second})}});
  }
  const TempFile file(conversations.dump());
  DatasetOptions options;
  options.name = "sharegpt";
  options.path = file.path();
  options.n_prompts = 4;
  std::vector<std::string> prompts;
  for (const ServingRequest& request : requests_of(options)) {
    EXPECT_EQ(request.prompt_tokens, 9) << request.prompt;
    EXPECT_EQ(request.output_tokens, 6) << request.prompt;
    prompts.push_back(request.prompt);
  }
  EXPECT_EQ(prompts, (std::vector<std::string>{"What is 3 + 12?", "What is 1 + 12?",
                                               "What is 2 + 12?", "What is 4 + 12?"}));
  options.name = "random";
  options.n_prompts = 3;
  options.input_tokens = 20;
  options.output_tokens = 12;
  options.range_ratio = 0.5;
  prompts.clear();
  for (const ServingRequest& request : requests_of(options)) prompts.push_back(request.prompt);
  EXPECT_EQ(prompts,
            (std::vector<std::string>{"What is 3 + 12?What is 3 + 1", "What is 1 + 12?What is 1",
                                      "What is 2 + 12?What is 2 + 12?What is"}));
}

ServingOutput read(ServingApi api, const std::vector<std::string>& lines, bool streams = true) {
  ServingOutput output;
  output.output_tokens = 99;
  AnswerReader reader(api, streams, output);
  double now = 0;
  try {
    for (const std::string& line : lines) reader.line(line, now += 0.5);
    reader.finish();
  } catch (const Error& error) {
    output.error = error.what();
  }
  return output;
}

TEST(AnswerReader, CompletionsCountTextsAndTheirUsage) {
  const ServingOutput o = read(
      ServingApi::kCompletions,
      {R"(data: {"choices": [{"text": ""}], "usage": {"completion_tokens": 1}})", "",
       R"(data: {"choices": [{"text": "a"}], "usage": {"completion_tokens": 2}})", "\r",
       R"(data: {"choices": [{"text": "bc"}], "usage": {"completion_tokens": 5}})",
       R"(data: {"choices": [{"text": ""}], "usage": {"completion_tokens": 7}})", "data: [DONE]"});
  EXPECT_TRUE(o.success) << o.error;
  EXPECT_EQ(o.text, "abc");
  EXPECT_EQ(o.output_tokens, 5);  // sglang reads usage only beside text
  EXPECT_EQ(o.ttft, 1.5);
  EXPECT_EQ(o.itls, std::vector<double>{1});
  EXPECT_EQ(o.latency, 3.5);
}

TEST(AnswerReader, WithoutUsageTheTokensAskedForCount) {
  const ServingOutput o =
      read(ServingApi::kCompletions, {R"(data: {"choices": [{"text": "a"}], "usage": null})"});
  EXPECT_TRUE(o.success);
  EXPECT_EQ(o.output_tokens, 99);
}

TEST(AnswerReader, WhatBreaksTheOriginalIsAnError) {
  for (const char* line : {R"(data: {"choices": []})", R"(data: {"error": {"message": "no"}})",
                           R"(data: {"choices": [{"delta": {}}]})", ": ping", "event: message",
                           R"(data:{"choices": [{"text": "a"}]})", "data: 3"}) {
    const ServingOutput o = read(ServingApi::kCompletions, {line, "data: [DONE]"});
    EXPECT_FALSE(o.success) << line;
    EXPECT_NE(o.error, "") << line;
  }
  EXPECT_EQ(read(ServingApi::kCompletions, {"", "\r"}).error, "the answer is empty");
  EXPECT_FALSE(read(ServingApi::kChat, {R"(data: {"choices": [3]})"}).success);
}

TEST(AnswerReader, ChatsCountThinkingAsTextAndTakeAnyUsage) {
  const ServingOutput o =
      read(ServingApi::kChat,
           {R"(data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]})",
            R"(data: {"choices": [{"delta": {"reasoning_content": "hm", "reasoning": "hm"}}]})",
            R"(data: {"choices": [{"delta": {"reasoning_content": "", "reasoning": "so"}}]})",
            R"(data: {"choices": [{"delta": {"reasoning_content": ".", "content": "a"}}]})",
            R"(data: {"choices": [{"delta": {"reasoning_content": null, "content": "b"}}]})",
            R"(data: {"choices": [{"delta": null}]})", R"(data: {"choices": [], "usage": null})",
            R"(data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 6}})",
            R"(data: {"usage": {"prompt_tokens": 0}})", "data: [DONE]"});
  EXPECT_TRUE(o.success) << o.error;
  EXPECT_EQ(o.text, "hmso.ab");
  EXPECT_EQ(o.output_tokens, 6);
  EXPECT_EQ(o.server_prompt_tokens, 7);
  EXPECT_EQ(o.ttft, 1);
  EXPECT_EQ(o.itls, (std::vector<double>{0.5, 0.5, 0.5}));
  const ServingOutput whole =
      read(ServingApi::kChat,
           {R"({"choices": [{"message": {"content": "ab", "reasoning_content": "hm "}}], )"
            R"("usage": {"prompt_tokens": 9, "completion_tokens": 2}})"},
           false);
  EXPECT_TRUE(whole.success) << whole.error;
  EXPECT_EQ(whole.text, "hm ab");
  EXPECT_EQ(whole.server_prompt_tokens, 9);
  EXPECT_EQ(whole.ttft, whole.latency);
}

TEST(AnswerReader, TakesTheServersCountOfThePrompt) {
  const std::pair<ServingApi, const char*> lines[] = {
      {ServingApi::kCompletions, R"({"choices": [{"text": "a"}], "usage": {"prompt_tokens": 7}})"},
      {ServingApi::kChat, R"({"choices": [], "usage": {"prompt_tokens": 7}})"},
      {ServingApi::kGenerate, R"({"meta_info": {"prompt_tokens": 7}})"}};
  for (const auto& [api, line] : lines) EXPECT_EQ(read(api, {line}).server_prompt_tokens, 7);
  EXPECT_EQ(read(ServingApi::kGenerate, {"{}"}).server_prompt_tokens, 0);
}

TEST(AnswerReader, GenerateSharesAGapAmongItsTokens) {
  const ServingOutput o = read(
      ServingApi::kGenerate, {R"(data: {"text": "a", "meta_info": {"completion_tokens": 1}})",
                              R"(data: {"text": "abc", "meta_info": {"completion_tokens": 3}})",
                              R"(data: {"text": "abc", "meta_info": {"completion_tokens": 3}})",
                              R"(data: {"text": "abcd", "meta_info": {"completion_tokens": 4}})"});
  EXPECT_TRUE(o.success) << o.error;
  EXPECT_EQ(o.text, "abcd");
  EXPECT_EQ(o.itls, (std::vector<double>{0.25, 0.25, 1}));
  EXPECT_FALSE(read(ServingApi::kGenerate, {R"(data: {"text": "a"})"}).success);
}

TEST(Summary, IsNumpys) {
  const LatencySummary s = summary_of({0.4, 0.1, 0.2, 0.3});
  EXPECT_DOUBLE_EQ(s.mean, 250);
  EXPECT_DOUBLE_EQ(s.median, 250);
  EXPECT_NEAR(s.deviation, 111.803398874989, 1e-9);
  EXPECT_NEAR(s.p95, 385, 1e-9);
  EXPECT_NEAR(s.p99, 397, 1e-9);
  EXPECT_DOUBLE_EQ(s.most, 400);
  EXPECT_EQ(summary_of({}).mean, 0);
  EXPECT_EQ(summary_of({0.5}).p99, 500);
}

ServingOutput ended(double latency, double ttft, int n_output) {
  ServingOutput o;
  o.success = true;
  o.text = "12";
  o.latency = latency;
  o.ttft = ttft;
  o.prompt_tokens = 10;
  o.output_tokens = n_output;
  return o;
}

TEST(Metrics, CountWhatSucceededAndWhatWasUnderWay) {
  const Tokenizer tokenizer = Tokenizer::from_directory(kTinyR1);
  const auto n_text = static_cast<int64_t>(tokenizer.encode("12").size());
  std::vector<ServingOutput> outputs = {ended(3, 1, 5), ended(2, 1, 1), {}, {}, {}};
  outputs[2].error = "refused";
  outputs[2].prompt_tokens = outputs[2].output_tokens = 1000;
  outputs[3] = ended(4, 2, 1000);
  outputs[3].success = false;
  outputs[3].interrupted = true;
  outputs[4].interrupted = true;  // interrupted before its first text
  const ServingMetrics m = metrics_of(outputs, 2, tokenizer);
  EXPECT_EQ(m.completed, 2);
  EXPECT_EQ(m.failed, 1);
  EXPECT_EQ(m.interrupted, 2);
  EXPECT_EQ(m.input_tokens, 30);
  EXPECT_EQ(m.output_tokens, 6 + n_text);
  EXPECT_EQ(m.retokenized, 3 * n_text);
  EXPECT_DOUBLE_EQ(m.requests_per_second(), 1);
  EXPECT_DOUBLE_EQ(m.concurrency, 4.5);
  EXPECT_DOUBLE_EQ(m.tpot.most, n_text > 1 ? 2000.0 / static_cast<double>(n_text - 1) : 500);
}

// The figures and the text of the published run, including trailing blanks.
TEST(Report, HasTheOriginalsBytes) {
  const ServingSetup setup = {.backend = "lmdeploy",
                              .dataset = "random",
                              .request_rate = INFINITY,
                              .concurrency = {},
                              .sharegpt_output_tokens = {},
                              .input_tokens = 2048,
                              .output_tokens = 2048,
                              .range_ratio = 1};
  ServingMetrics m;
  m.seconds = 127.11;
  m.completed = 2000;
  m.input_tokens = m.output_tokens = 4096000;
  m.retokenized = 833623;
  m.concurrency = 1949.99;
  m.e2e = {.mean = 123932.63, .median = 123990.52};
  m.ttft = {.mean = 18867.14, .median = 18679.39, .p99 = 33717.70};
  m.itl = {.mean = 118.64, .median = 127.52, .p95 = 167.02, .p99 = 365.22, .most = 3469.54};
  EXPECT_EQ(report_text(setup, m), R"(
============ Serving Benchmark Result ============
Backend:                                 lmdeploy  
Traffic request rate:                    inf       
Max request concurrency:                 not set   
Successful requests:                     2000      
Benchmark duration (s):                  127.11    
Total input tokens:                      4096000   
Total generated tokens:                  4096000   
Total generated tokens (retokenized):    833623    
Request throughput (req/s):              15.73     
Input token throughput (tok/s):          32224.06  
Output token throughput (tok/s):         32224.06  
Total token throughput (tok/s):          64448.12  
Concurrency:                             1949.99   
----------------End-to-End Latency----------------
Mean E2E Latency (ms):                   123932.63 
Median E2E Latency (ms):                 123990.52 
---------------Time to First Token----------------
Mean TTFT (ms):                          18867.14  
Median TTFT (ms):                        18679.39  
P99 TTFT (ms):                           33717.70  
---------------Inter-Token Latency----------------
Mean ITL (ms):                           118.64    
Median ITL (ms):                         127.52    
P95 ITL (ms):                            167.02    
P99 ITL (ms):                            365.22    
Max ITL (ms):                            3469.54   
==================================================
)");
  const std::string line = report_json(setup, m);
  EXPECT_EQ(
      line.rfind("{\"backend\": \"lmdeploy\", \"dataset_name\": \"random\", \"request_rate\": "
                 "Infinity, \"max_concurrency\": null, \"sharegpt_output_len\": null, "
                 "\"random_input_len\": 2048, \"random_output_len\": 2048, "
                 "\"random_range_ratio\": 1.0, \"duration\": 127.11, \"completed\": 2000, ",
                 0),
      0U)
      << line;
  const std::string details = report_json(setup, m, std::vector{ended(3, 1, 5)});
  EXPECT_NE(details.find("\"ttfts\": [1.0], \"itls\": [[]], \"generated_texts\": [\"12\"], "
                         "\"errors\": [\"\"], \"p95_e2e_latency_ms\": "),
            std::string::npos)
      << details;
  ServingOutput counted = ended(3, 1, 5);
  counted.server_prompt_tokens = 12;  // includes the tokens of the chat template
  const std::string lengths = report_json(setup, m, std::vector{ended(3, 1, 5), counted});
  EXPECT_NE(lengths.find("\"input_lens\": [10, 12]"), std::string::npos) << lengths;
}

TEST(Report, ShowsRatesAsPythonDoes) {
  ServingSetup setup = {.backend = "vllm",
                        .dataset = "",
                        .request_rate = 4,
                        .concurrency = 16,
                        .sharegpt_output_tokens = {},
                        .input_tokens = 1,
                        .output_tokens = 1,
                        .range_ratio = 0};
  ServingMetrics m;
  m.seconds = 1;
  m.accept_length = 1.8;
  const std::string text = report_text(setup, m);
  EXPECT_NE(text.find("Traffic request rate:                    4.0       \n"), std::string::npos);
  EXPECT_NE(text.find("Max request concurrency:                 16        \n"), std::string::npos);
  EXPECT_NE(text.find("Accept length:                           1.80      \n"), std::string::npos);
}

ServingPoint point(int concurrency, double per_second, double tpot_ms) {
  ServingPoint p{concurrency, {}};
  p.metrics.seconds = 1;
  p.metrics.output_tokens = static_cast<int64_t>(per_second);
  p.metrics.tpot.mean = tpot_ms;
  return p;
}

TEST(Sweep, FindsTheParetoFront) {
  const std::vector<ServingPoint> points = {point(1, 100, 10), point(2, 180, 12), point(4, 170, 15),
                                            point(8, 400, 20)};
  const bool wanted[] = {true, true, false, true};
  for (size_t i = 0; i < points.size(); ++i) EXPECT_EQ(on_pareto_front(points, i), wanted[i]) << i;
  const std::string svg = sweep_chart("a < b", points);
  EXPECT_NE(svg.find("a &lt; b"), std::string::npos);
  EXPECT_EQ(svg.find("roofline"), std::string::npos);
  EXPECT_EQ(sweep_chart("", {}), "");
}

TEST(HighestThat, FindsTheLimitInFewTries) {
  for (const int most : {1, 7, 64, 1000})
    for (const int limit : {0, 1, 2, 3, 5, 6, 7, 31, 64, 500, 999, 5000}) {
      int n_tries = 0;
      const int found = highest_that(most, [&](int n) {
        EXPECT_GE(n, 1);
        EXPECT_LE(n, most);
        ++n_tries;
        return n <= limit;
      });
      const int wanted = std::min(limit, most);
      EXPECT_LE(found, wanted);
      EXPECT_GE(found, wanted - std::max(0, wanted / 20)) << most << " " << limit;
      EXPECT_LE(n_tries, 20);
    }
}

TEST(Address, IsReadFromAUrl) {
  const ServerAddress address = parse_address("http://localhost:8000/prefix/");
  EXPECT_EQ(address.url(), "http://localhost:8000/prefix");
  EXPECT_EQ(parse_address("http://a.example").port, "80");
  for (const char* url : {"https://a", "a:80", "http://:80", "http://a:b", "http://a:123456", ""})
    EXPECT_NE(error_of([&] { parse_address(url); }), "no error") << url;
}

TEST(Request, IsWhatTheOriginalSends) {
  ServingLoadOptions o;
  o.model = "m";
  const ServingRequest request = {"hi", {}, 2, 3};
  EXPECT_EQ(request_body(o, request),
            R"({"model":"m","prompt":"hi","best_of":1,"max_tokens":3,"stream":true,)"
            R"("temperature":0.0,"ignore_eos":true})");
  o.api = ServingApi::kChat;
  EXPECT_EQ(request_body(o, request),
            R"({"model":"m","messages":[{"role":"user","content":"hi"}],)"
            R"("max_completion_tokens":3,"stream":true,"temperature":0.0,"ignore_eos":true})");
  o.ignore_eos = false;
  o.extra_body = {{"top_p", 0.5}, {"temperature", 1.0}, {"stream", false}};
  EXPECT_EQ(request_body(o, request),
            R"({"model":"m","messages":[{"role":"user","content":"hi"}],)"
            R"("max_completion_tokens":3,"stream":false,"temperature":1.0,"ignore_eos":false,)"
            R"("top_p":0.5})");
  o.extra_body = nlohmann::ordered_json::object();
  o.ignore_eos = true;
  o.api = ServingApi::kGenerate;
  EXPECT_EQ(request_body(o, {"", {5, 6}, 2, 3}),
            R"({"input_ids":[5,6],"sampling_params":{"temperature":0.0,"max_new_tokens":3,)"
            R"("ignore_eos":true},"stream":true,"lora_path":null,"return_logprob":false,)"
            R"("return_routed_experts":false,"logprob_start_len":-1})");
}

}  // namespace
}  // namespace tandem
