// What `tandem bench serving` makes of answers: every field of a line, figures worked out by hand,
// and whole reports.
#include <gtest/gtest.h>

#include <cmath>

#include "bench/line_chart.h"
#include "bench/serving/answer_reader.h"
#include "bench/serving/serving_report.h"
#include "tests/error_of.h"

namespace tandem {
namespace {

struct TimedLine {
  double seconds;
  const char* text;
};

// The output when these lines come; 50 tokens were asked for.
ServingOutput read_lines(ServingApi api, const std::vector<TimedLine>& lines, bool streams = true) {
  ServingOutput output;
  output.output_tokens = 50;
  AnswerReader reader(api, streams, output);
  output.error = error_of([&] {
    for (const TimedLine& line : lines) reader.line(line.text, line.seconds);
    reader.finish();
  });
  return output;
}

TEST(AnswerLines, SpaceAroundALineIsIgnored) {
  const ServingOutput o = read_lines(ServingApi::kCompletions,
                                     {{1, " \t\r\n\v\f"},
                                      {2, "\t\v data: {\"choices\": [{\"text\": \" a \"}]} \f\r\n"},
                                      {3, "{\"choices\": [{\"text\": \"b\"}]}"},
                                      {4, "data: "},
                                      {5, ""}});
  EXPECT_EQ(o.error, "a line is no JSON object: \"data:\"");  // its blank was stripped
  EXPECT_EQ(o.text, " a b");
  EXPECT_EQ(o.ttft, 2);
  EXPECT_EQ(o.itls, std::vector<double>{1});
  EXPECT_EQ(o.latency, 4);
}

TEST(AnswerLines, TheEndAloneIsASuccess) {
  const ServingOutput o = read_lines(ServingApi::kCompletions, {{3, "data: [DONE]"}});
  EXPECT_TRUE(o.success);
  EXPECT_EQ(o.latency, 3);
  EXPECT_EQ(o.ttft, 0);
  EXPECT_EQ(o.output_tokens, 50);
  EXPECT_EQ(read_lines(ServingApi::kCompletions, {{1, "[DONE]"}}).error, "no error");
  EXPECT_EQ(read_lines(ServingApi::kCompletions, {}).error, "the answer is empty");
  EXPECT_FALSE(read_lines(ServingApi::kCompletions, {{1, "\r"}}).success);
}

TEST(AnswerLines, EachErrorShowsItsLine) {
  const std::tuple<ServingApi, const char*, const char*> cases[] = {
      {ServingApi::kCompletions, "data: [1]", "a line is no JSON object: \"[1]\""},
      {ServingApi::kCompletions, "data: {\"a", R"(a line is no JSON object: "{\"a")"},
      {ServingApi::kCompletions, "{}", "a line has no choice: \"{}\""},
      {ServingApi::kCompletions, R"({"choices": {}})",
       R"(a line has no choice: "{\"choices\": {}}")"},
      {ServingApi::kCompletions, R"({"choices": []})",
       R"(a line has no choice: "{\"choices\": []}")"},
      {ServingApi::kCompletions, R"({"choices": ["a"]})",
       R"(a line has no choice: "{\"choices\": [\"a\"]}")"},
      {ServingApi::kCompletions, R"({"choices": [{}]})",
       R"(a line has no text: "{\"choices\": [{}]}")"},
      {ServingApi::kChat, R"({"choices": [3]})", R"(a line has no choice: "{\"choices\": [3]}")"},
      {ServingApi::kChat, "data: no", "a line is no JSON object: \"no\""},
      {ServingApi::kGenerate, "data: no", "a line is no JSON object: \"no\""},
      {ServingApi::kGenerate, R"({"text": "a"})",
       R"(a line has no meta_info.completion_tokens: "{\"text\": \"a\"}")"},
      {ServingApi::kGenerate, R"({"text":"a","meta_info":{"completion_tokens":1.5}})",
       R"(a line has no meta_info.completion_tokens: "{\"text\":\"a\",\"meta_info\":{\"completion_tokens\":1.5}}")"}};
  for (const auto& [api, line, wanted] : cases) {
    const ServingOutput o = read_lines(api, {{1, line}, {2, "data: [DONE]"}});
    EXPECT_EQ(o.error, wanted);
    EXPECT_FALSE(o.success) << line;
    EXPECT_EQ(o.latency, 1) << line;
  }
  EXPECT_EQ(read_lines(ServingApi::kChat, {{1, R"({"choices": [{"delta": {}}]})"}}, false).error,
            R"(the answer has no message: "{\"choices\": [{\"delta\": {}}]}")");
  EXPECT_EQ(read_lines(ServingApi::kChat, {{1, R"({"choices": []})"}}, false).error,
            R"(a line has no choice: "{\"choices\": []}")");
}

// Null, numbers and empty text are no text: they neither count as the first nor as a gap.
TEST(AnswerLines, OnlyTextCounts) {
  const ServingOutput o =
      read_lines(ServingApi::kCompletions,
                 {{1, R"({"choices": [{"text": null}], "usage": {"completion_tokens": 9}})"},
                  {2, R"({"choices": [{"text": 3}]})"},
                  {3, R"({"choices": [{"text": "a"}, {"text": "no"}]})"},
                  {4, R"({"choices": [{"text": ""}]})"},
                  {7, R"({"choices": [{"text": "b"}]})"},
                  {9, R"({"choices": [{"text": "c"}]})"}});
  EXPECT_TRUE(o.success);
  EXPECT_EQ(o.text, "abc");
  EXPECT_EQ(o.ttft, 3);
  EXPECT_EQ(o.itls, (std::vector<double>{4, 2}));
  EXPECT_EQ(o.latency, 9);
  EXPECT_EQ(o.output_tokens, 50);
}

TEST(AnswerLines, CountsAreWholeNumbersOfAnObject) {
  const std::tuple<const char*, int, int> cases[] = {
      {R"({"completion_tokens": 3, "prompt_tokens": 4})", 3, 4},
      {R"({"completion_tokens": 0, "prompt_tokens": 1})", 0, 1},
      {R"({"completion_tokens": 3.0, "prompt_tokens": 4.0})", 50, 0},
      {R"({"completion_tokens": "3", "prompt_tokens": null})", 50, 0},
      {R"({"prompt_tokens": -4})", 50, 0},
      {"[3, 4]", 50, 0},
      {"{}", 50, 0},
      {"7", 50, 0}};
  for (const auto& [usage, n_output, n_prompt] : cases) {
    const std::string text = std::string(R"({"choices": [{"text": "a"}], "usage": )") + usage + "}",
                      chat = std::string(R"({"choices": [], "usage": )") + usage + "}";
    for (const auto& [api, line] :
         {std::pair{ServingApi::kCompletions, text}, std::pair{ServingApi::kChat, chat}}) {
      const ServingOutput o = read_lines(api, {{1, line.c_str()}});
      EXPECT_TRUE(o.success) << line << o.error;
      EXPECT_EQ(o.output_tokens, n_output) << line;
      EXPECT_EQ(o.server_prompt_tokens, n_prompt) << line;
    }
  }
}

TEST(AnswerLines, ChatsReadBothNamesOfReasoning) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"reasoning_content": "a", "reasoning": "b", "content": "c"})", "ac"},
      {R"({"reasoning_content": "", "reasoning": "b", "content": "c"})", "bc"},
      {R"({"reasoning": "b"})", "b"},
      {R"({"content": "c", "role": "d"})", "c"},
      {R"({"content": 3})", ""},
      {"{}", ""},
      {"[]", ""},
      {"null", ""}};
  for (const auto& [message, wanted] : cases) {
    const std::string delta = std::string(R"({"choices": [{"delta": )") + message + "}]}";
    const ServingOutput o = read_lines(ServingApi::kChat, {{2, delta.c_str()}});
    EXPECT_TRUE(o.success) << message;
    EXPECT_EQ(o.text, wanted) << message;
    EXPECT_EQ(o.ttft, *wanted ? 2 : 0) << message;
    if (*message != '{') continue;
    const std::string whole = std::string(R"({"choices": [{"message": )") + message + "}]}";
    const ServingOutput answer = read_lines(ServingApi::kChat, {{3, whole.c_str()}}, false);
    EXPECT_EQ(answer.text, wanted) << message;
    EXPECT_EQ(answer.ttft, 3) << message;
    EXPECT_TRUE(answer.itls.empty());
  }
  EXPECT_TRUE(read_lines(ServingApi::kChat, {{1, R"({"choices": [{"finish": 1}]})"}}).success);
  EXPECT_TRUE(read_lines(ServingApi::kChat, {{1, "{}"}}).success);
}

TEST(AnswerLines, GenerateCountsTheTokensOfEachGap) {
  const ServingOutput o = read_lines(
      ServingApi::kGenerate,
      {{1, R"({"text": "", "meta_info": {"prompt_tokens": 8}})"},
       {2, R"({"text": "ab", "meta_info": {"completion_tokens": 2, "prompt_tokens": 9}})"},
       {3, R"({"text": "abc", "meta_info": {"completion_tokens": 2}})"},
       {5, R"({"text": "abcd", "meta_info": {"completion_tokens": 6, "prompt_tokens": 0}})"},
       {6, R"({"text": "abcde", "meta_info": {"completion_tokens": 7}})"}});
  EXPECT_TRUE(o.success);
  EXPECT_EQ(o.text, "abcde");
  EXPECT_EQ(o.output_tokens, 7);
  EXPECT_EQ(o.server_prompt_tokens, 9);
  EXPECT_EQ(o.ttft, 2);
  EXPECT_EQ(o.itls, (std::vector<double>{0.75, 0.75, 0.75, 0.75, 1}));
  EXPECT_EQ(o.latency, 6);
}

// A first text of no token counts as the first text, and later ones do not.
TEST(AnswerLines, GenerateMayBeginWithoutAToken) {
  const ServingOutput o = read_lines(
      ServingApi::kGenerate, {{1, R"({"text": "a", "meta_info": {"completion_tokens": 0}})"},
                              {2, R"({"text": "b", "meta_info": {"completion_tokens": 0}})"},
                              {4, R"({"text": "c", "meta_info": {"completion_tokens": 1}})"}});
  EXPECT_EQ(o.ttft, 1);
  EXPECT_EQ(o.itls, std::vector<double>{3});
}

// Position (n - 1) p / 100 in the sorted list, between two entries in proportion.
TEST(Summary, InterpolatesBetweenNeighbours) {
  const LatencySummary three = summary_of({4, 1, 2});
  EXPECT_NEAR(three.mean, 7000.0 / 3, 1e-9);
  EXPECT_EQ(three.median, 2000);
  EXPECT_NEAR(three.deviation, std::sqrt(14.0 / 9) * 1e3, 1e-9);
  EXPECT_NEAR(three.p95, 3800, 1e-9);
  EXPECT_NEAR(three.p99, 3960, 1e-9);
  EXPECT_EQ(three.most, 4000);
  std::vector<double> hundred_and_one;
  for (int i = 100; i >= 0; --i) hundred_and_one.push_back(i * i);
  const LatencySummary many = summary_of(hundred_and_one);
  EXPECT_NEAR(many.median, 2500e3, 1e-6);
  EXPECT_NEAR(many.p95, 9025e3, 1e-6);
  EXPECT_NEAR(many.p99, 9801e3, 1e-6);
  EXPECT_EQ(many.most, 1e7);
  EXPECT_EQ(summary_of({1, 3}).median, 2000);
  EXPECT_EQ(summary_of({8, 1, 2, 4}).median, 3000);
  const LatencySummary one = summary_of({0.25});
  EXPECT_EQ(one.mean + one.median + one.p95 + one.p99 + one.most, 1250);
  EXPECT_EQ(one.deviation, 0);
}

ServingOutput ended(const std::string& text, double latency, double ttft,
                    const std::vector<double>& itls, int n_prompt, int n_output) {
  ServingOutput o;
  o.success = true;
  o.text = text;
  o.latency = latency;
  o.ttft = ttft;
  o.itls = itls;
  o.prompt_tokens = n_prompt;
  o.output_tokens = n_output;
  return o;
}

TEST(Metrics, AreThoseOfThreeRequests) {
  const Tokenizer tokenizer = Tokenizer::from_directory(TANDEM_SOURCE_DIR "/models/tiny-r1");
  std::vector<ServingOutput> outputs = {ended("123", 5, 1, {1, 3}, 7, 5),
                                        ended("1", 5, 2, {}, 11, 2), ended("", 2, 0, {}, 1, 1)};
  outputs[0].server_prompt_tokens = 70;
  const ServingMetrics m = metrics_of(outputs, 8, tokenizer);
  EXPECT_EQ(m.seconds, 8);
  EXPECT_EQ(m.completed, 3);
  EXPECT_EQ(m.failed + m.interrupted, 0);
  EXPECT_EQ(m.input_tokens, 19);
  EXPECT_EQ(m.output_tokens, 8);
  EXPECT_EQ(m.retokenized, 4);
  EXPECT_EQ(m.concurrency, 1.5);
  EXPECT_EQ(m.requests_per_second(), 0.375);
  EXPECT_EQ(m.input_per_second(), 2.375);
  EXPECT_EQ(m.output_per_second(), 1);
  EXPECT_EQ(m.e2e.mean, 4000);
  EXPECT_EQ(m.ttft.mean, 1000);
  EXPECT_EQ(m.tpot.mean, 2000);  // (5 - 1) / (5 - 1) and (5 - 2) / (2 - 1)
  EXPECT_EQ(m.itl.mean, 2000);
  EXPECT_EQ(m.user_speed(), 0.5);
  EXPECT_NEAR(m.slow_user_speed(), 1 / 2.98, 1e-12);
  EXPECT_FALSE(m.accept_length);
  EXPECT_EQ(ServingMetrics().user_speed(), 0);
  EXPECT_EQ(ServingMetrics().slow_user_speed(), 0);
}

ServingMetrics all_different() {
  ServingMetrics m;
  m.seconds = 4;
  m.completed = 10;
  m.failed = 2;
  m.interrupted = 3;
  m.input_tokens = 1000;
  m.output_tokens = 300;
  m.retokenized = 299;
  m.e2e = {.mean = 1.5, .median = 2.5, .deviation = 3.5, .p95 = 4.5, .p99 = 5.5, .most = 6.5};
  m.ttft = {
      .mean = 11.5, .median = 12.5, .deviation = 13.5, .p95 = 14.5, .p99 = 15.5, .most = 16.5};
  m.tpot = {
      .mean = 21.5, .median = 22.5, .deviation = 23.5, .p95 = 24.5, .p99 = 25.5, .most = 26.5};
  m.itl = {.mean = 31.5, .median = 32.5, .deviation = 33.5, .p95 = 34.5, .p99 = 35.5, .most = 36.5};
  m.concurrency = 7.25;
  return m;
}

const ServingSetup kSetup = {.backend = "vllm",
                             .dataset = "sharegpt",
                             .request_rate = 2.5,
                             .concurrency = 6,
                             .sharegpt_output_tokens = 64,
                             .input_tokens = 128,
                             .output_tokens = 32,
                             .range_ratio = 0.5};
const std::string kFields =
    R"({"backend": "vllm", "dataset_name": "sharegpt", "request_rate": 2.5, "max_concurrency": 6, )"
    R"("sharegpt_output_len": 64, "random_input_len": 128, "random_output_len": 32, )"
    R"("random_range_ratio": 0.5, "duration": 4.0, "completed": 10, "total_input_tokens": 1000, )"
    R"("total_output_tokens": 300, "total_output_tokens_retokenized": 299, )"
    R"("request_throughput": 2.5, "input_throughput": 250.0, "output_throughput": 75.0, )"
    R"("mean_e2e_latency_ms": 1.5, "median_e2e_latency_ms": 2.5, "std_e2e_latency_ms": 3.5, )"
    R"("p99_e2e_latency_ms": 5.5, "mean_ttft_ms": 11.5, "median_ttft_ms": 12.5, )"
    R"("std_ttft_ms": 13.5, "p99_ttft_ms": 15.5, "mean_tpot_ms": 21.5, "median_tpot_ms": 22.5, )"
    R"("std_tpot_ms": 23.5, "p99_tpot_ms": 25.5, "mean_itl_ms": 31.5, "median_itl_ms": 32.5, )"
    R"("std_itl_ms": 33.5, "p95_itl_ms": 34.5, "p99_itl_ms": 35.5, "concurrency": 7.25, )";
const std::string kMore =
    R"("p95_e2e_latency_ms": 4.5, "p95_ttft_ms": 14.5, "p95_tpot_ms": 24.5, "max_itl_ms": 36.5, )"
    R"("failed": 2, "interrupted": 3})"
    "\n";

TEST(Report, JsonHasEveryFigureOnce) {
  ServingMetrics m = all_different();
  EXPECT_EQ(report_json(kSetup, m), kFields + R"("accept_length": null, )" + kMore);
  m.accept_length = 1.75;
  EXPECT_EQ(report_json(kSetup, m), kFields + R"("accept_length": 1.75, )" + kMore);
  std::vector<ServingOutput> outputs = {ended("é\"\n", 5, 1.5, {0.5, 0.25}, 7, 5),
                                        ended("", 5, 2.5, {}, 8, 6), ended("a", 0, 0, {}, 9, 4)};
  outputs[0].server_prompt_tokens = 1;
  outputs[1].success = outputs[2].success = false;
  outputs[1].error = "why";
  outputs[2].interrupted = true;
  EXPECT_EQ(report_json(kSetup, m, outputs),
            kFields +
                R"("accept_length": 1.75, "input_lens": [1, 8, 9], "output_lens": [5, 0, 0], )"
                R"("ttfts": [1.5, 2.5, 0.0], "itls": [[0.5, 0.25], [], []], )"
                R"("generated_texts": ["\u00e9\"\n", "", "a"], "errors": ["", "why", ""], )" +
                kMore);
}

TEST(Report, TextHasEveryFigureInItsPlace) {
  ServingMetrics m = all_different();
  m.accept_length = 1.755;
  EXPECT_EQ(report_text(kSetup, m), R"(
============ Serving Benchmark Result ============
Backend:                                 vllm      
Traffic request rate:                    2.5       
Max request concurrency:                 6         
Successful requests:                     10        
Benchmark duration (s):                  4.00      
Total input tokens:                      1000      
Total generated tokens:                  300       
Total generated tokens (retokenized):    299       
Request throughput (req/s):              2.50      
Input token throughput (tok/s):          250.00    
Output token throughput (tok/s):         75.00     
Total token throughput (tok/s):          325.00    
Concurrency:                             7.25      
Accept length:                           1.75      
----------------End-to-End Latency----------------
Mean E2E Latency (ms):                   1.50      
Median E2E Latency (ms):                 2.50      
---------------Time to First Token----------------
Mean TTFT (ms):                          11.50     
Median TTFT (ms):                        12.50     
P99 TTFT (ms):                           15.50     
---------------Inter-Token Latency----------------
Mean ITL (ms):                           31.50     
Median ITL (ms):                         32.50     
P95 ITL (ms):                            34.50     
P99 ITL (ms):                            35.50     
Max ITL (ms):                            36.50     
==================================================
)");
}

TEST(Report, TableHasEveryLatency) {
  EXPECT_EQ(latency_table(all_different()), R"(
| ms   |       mean |     median |        P95 |        P99 |       most |
|:-----|-----------:|-----------:|-----------:|-----------:|-----------:|
| TTFT |      11.50 |      12.50 |      14.50 |      15.50 |      16.50 |
| TPOT |      21.50 |      22.50 |      24.50 |      25.50 |      26.50 |
| ITL  |      31.50 |      32.50 |      34.50 |      35.50 |      36.50 |
| E2E  |       1.50 |       2.50 |       4.50 |       5.50 |       6.50 |
)");
}

// A run is off the front only if another is better in both figures; equal in one is not better.
TEST(Sweep, TableMarksTheFront) {
  const auto point = [](int concurrency, int64_t output_tokens, double tpot_ms, int failed) {
    ServingPoint p{concurrency, {}};
    p.metrics.seconds = 2;
    p.metrics.output_tokens = output_tokens;
    p.metrics.tpot = {.mean = tpot_ms, .p99 = 2 * tpot_ms};
    p.metrics.ttft = {.mean = 10.25 * concurrency, .p99 = 11.25 * concurrency};
    p.metrics.itl = {.mean = 12.125 * concurrency, .p99 = 13.25 * concurrency};
    p.metrics.failed = failed;
    return p;
  };
  const std::vector<ServingPoint> points = {point(1, 200, 10, 0), point(2, 200, 12.5, 0),
                                            point(4, 300, 12.5, 7), point(8, 250, 20, 0),
                                            point(16, 400, 0, 0)};
  EXPECT_EQ(
      sweep_table(points, 0),
      "\n| concurrency | output tok/s | tok/s a user | slowest 1 % | TTFT ms mean |     P99 | "
      "ITL ms mean |     P99 | failed | Pareto |\n"
      "|------------:|-------------:|-------------:|------------:|-------------:|--------:|"
      "------------:|--------:|-------:|:-------|\n"
      "|           1 |        100.0 |       100.00 |       50.00 |         10.2 |    11.2 | "
      "      12.12 |    13.2 |      0 | yes    |\n"
      "|           2 |        100.0 |        80.00 |       40.00 |         20.5 |    22.5 | "
      "      24.25 |    26.5 |      0 | yes    |\n"
      "|           4 |        150.0 |        80.00 |       40.00 |         41.0 |    45.0 | "
      "      48.50 |    53.0 |      7 | yes    |\n"
      "|           8 |        125.0 |        50.00 |       25.00 |         82.0 |    90.0 | "
      "      97.00 |   106.0 |      0 |        |\n"
      "|          16 |        200.0 |         0.00 |        0.00 |        164.0 |   180.0 | "
      "     194.00 |   212.0 |      0 | yes    |\n");
  const std::string with_gpus = sweep_table(std::span(points).first(1), 8);
  EXPECT_EQ(
      with_gpus,
      "\n| concurrency | output tok/s | tok/s a GPU | tok/s a user | slowest 1 % | TTFT ms mean "
      "|     P99 | ITL ms mean |     P99 | failed | Pareto |\n"
      "|------------:|-------------:|------------:|-------------:|------------:|-------------:"
      "|--------:|------------:|--------:|-------:|:-------|\n"
      "|           1 |        100.0 |       12.50 |       100.00 |       50.00 |         10.2 "
      "|    11.2 |       12.12 |    13.2 |      0 | yes    |\n");
  EXPECT_EQ(
      sweep_chart("the title", points),
      svg_of({.title = "the title",
              .x_label = "tokens a second for a user",
              .y_label = "tokens a second altogether",
              .lines = {{"by concurrency", {{50, 125}, {80, 100}, {80, 150}, {100, 100}}, {}}}}));
  EXPECT_EQ(sweep_chart("x", std::span(points).last(1)), "");  // no user had a second token
}

}  // namespace
}  // namespace tandem
