// A whole run of `tandem bench serving` against a server that keeps its requests: options and their
// limits, the backends, warm-up, cache, accept length and the output file.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "bench/serving/serving_bench.h"
#include "tests/error_of.h"
#include "tests/fake_server.h"
#include "tests/repository.h"

namespace tandem {
namespace {

using test::FakeServer;
using test::kTinyR1;
using test::whole;
using Client = FakeServer::Client;

constexpr int kMost = 16'777'216;  // of every count

// A folder of its own that is removed at the end.
class Folder {
 public:
  Folder() : path_(testing::TempDir() + "serving_run_" + std::to_string(getpid())) {
    std::filesystem::create_directory(path_);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  const std::string path_;
};

std::string read_file(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

class ServingRun : public testing::Test {
 protected:
  ServingRun() {
    std::ofstream(folder_ / "data.json")
        << R"([{"conversations": [{"value": "12"}, {"value": "123456"}]}])";
    unsetenv("OPENAI_API_KEY");
  }

  // Needs no server to be set up: the model is given.
  ServingBenchOptions options() const {
    ServingBenchOptions o;
    o.model = "the-model";
    o.tokenizer = kTinyR1;
    o.dataset.path = folder_ / "data.json";
    o.output_file = folder_ / "out.jsonl";
    o.disable_tqdm = true;
    return o;
  }
  ServingBenchOptions options_for(const FakeServer& server) const {
    ServingBenchOptions o = options();
    o.host = "127.0.0.1";
    o.port = std::stoi(server.port());
    o.dataset.name = "random-ids";
    o.dataset.n_prompts = 3;
    o.dataset.input_tokens = 5;
    o.dataset.output_tokens = 40;
    o.dataset.range_ratio = 1;
    return o;
  }
  std::string error_with(const ServingBenchOptions& o) {
    return error_of(
        [&] { ServingBench(o, [&](const std::string& line) { said_.push_back(line); }); });
  }
  // Why a run ends before it measures.
  std::string failure_of(const ServingBenchOptions& o) {
    try {
      said_.clear();
      ServingBench bench(o, [&](const std::string& line) { said_.push_back(line); });
      bench.run({}, bench.n_requests());
    } catch (const std::runtime_error& error) {
      return error.what();
    }
    return "no failure";
  }

  const Folder folder_;
  std::vector<std::string> said_;
};

TEST_F(ServingRun, CountsHaveLimits) {
  struct Count {
    const char* name;
    int least;
    std::function<void(ServingBenchOptions&, int)> set;
  };
  const Count counts[] = {
      {"--num-prompts", 1, [](auto& o, int n) { o.dataset.n_prompts = n; }},
      {"--random-input-len", 1, [](auto& o, int n) { o.dataset.input_tokens = n; }},
      {"--random-output-len", 1, [](auto& o, int n) { o.dataset.output_tokens = n; }},
      {"--warmup-requests", 0, [](auto& o, int n) { o.warmup_requests = n; }},
      {"--sharegpt-output-len", 4, [](auto& o, int n) { o.dataset.sharegpt_output_tokens = n; }},
      {"--sharegpt-context-len", 4,
       [](auto& o, int n) {
         o.dataset.sharegpt_context = n;
         o.dataset.sharegpt_output_tokens = {};
       }},
      {"--max-concurrency", 1, [](auto& o, int n) { o.max_concurrency = n; }},
      {"--concurrency", 1, [](auto& o, int n) {
         o.dataset.n_prompts = kMost;
         o.concurrency = {1, n};
       }}};
  for (const Count& count : counts) {
    for (const int n : {count.least, kMost}) {
      ServingBenchOptions o = options();
      count.set(o, n);
      const bool too_short = std::string(count.name) == "--sharegpt-context-len" && n == 4;
      EXPECT_EQ(error_with(o),
                too_short ? folder_ / "data.json" + ": no conversation has the lengths asked for"
                          : "no error")
          << count.name << " " << n;
    }
    for (const int n : {count.least - 1, kMost + 1}) {
      ServingBenchOptions o = options();
      count.set(o, n);
      EXPECT_EQ(error_with(o), std::string(count.name) + " " + std::to_string(n) +
                                   ": must be between " + std::to_string(count.least) +
                                   " and 16777216");
    }
  }
}

TEST_F(ServingRun, OptionsHaveLimits) {
  using Set = std::function<void(ServingBenchOptions&)>;
  const std::pair<Set, const char*> cases[] = {
      {[](auto& o) { o.port = 1; }, "no error"},
      {[](auto& o) { o.port = 65535; }, "no error"},
      {[](auto& o) { o.port = 0; }, "--port 0: must be between 1 and 65535"},
      {[](auto& o) { o.port = 65536; }, "--port 65536: must be between 1 and 65535"},
      {[](auto& o) { o.dataset.range_ratio = 0; }, "no error"},
      {[](auto& o) { o.dataset.range_ratio = 1; }, "no error"},
      {[](auto& o) { o.dataset.range_ratio = -0.5; },
       "--random-range-ratio -0.5: must be between 0 and 1"},
      {[](auto& o) { o.dataset.range_ratio = 1.5; },
       "--random-range-ratio 1.5: must be between 0 and 1"},
      {[](auto& o) { o.request_rate = 1e-9; }, "no error"},
      {[](auto& o) { o.request_rate = 0; }, "--request-rate 0: must be above 0, or inf"},
      {[](auto& o) {
         o.slo_tokens_a_user = {1e-9, 999'999};
       },
       "no error"},
      {[](auto& o) {
         o.slo_tokens_a_user = {5, 0};
       },
       "--slo-tps-user 0: must be above 0"},
      {[](auto& o) { o.slo_tokens_a_user = {1e6}; }, "--slo-tps-user 1000000: must be above 0"},
      {[](auto& o) {
         o.dataset.n_prompts = 5;
         o.concurrency = {5};
       },
       "no error"},
      {[](auto& o) {
         o.dataset.n_prompts = 5;
         o.concurrency = {6};
       },
       "--concurrency 6: needs --num-prompts 6 or more"},
      {[](auto& o) { o.dataset.sends_ids = true; }, "no error"},
      {[](auto& o) {
         o.dataset.sends_ids = true;
         o.backend = "vllm";
       },
       "--tokenize-prompt: only with --backend sglang"},
      {[](auto& o) { o.dataset.name = "x"; },
       "--dataset-name x: must be sharegpt, random or random-ids"},
      {[](auto& o) { o.backend = "x"; },
       "--backend x: must be one of sglang, sglang-native, sglang-oai, sglang-oai-chat, vllm, "
       "vllm-chat, lmdeploy, lmdeploy-chat"},
      {[](auto& o) { o.extra_request_body = "{}"; }, "no error"},
      {[](auto& o) { o.extra_request_body = "{"; },
       "--extra-request-body \"{\": must be a JSON object"},
      {[](auto& o) { o.base_url = "https://a"; },
       "--base-url https://a: must begin with http:// (TLS is not supported here: measure behind "
       "the proxy)"}};
  for (const auto& [set, wanted] : cases) {
    ServingBenchOptions o = options();
    set(o);
    EXPECT_EQ(error_with(o), wanted);
  }
  ServingBenchOptions o = options();
  o.dataset.path = TANDEM_SOURCE_DIR "/no/such";
  EXPECT_NE(error_with(o), "no error");
  o = options();
  o.tokenizer = "/no/such";
  EXPECT_TRUE(says(error_with(o), "no tokenizer in \"/no/such\": "));
  EXPECT_TRUE(says(error_with(o), ": give --tokenizer, the directory of the model that is served"));
  o.tokenizer = "";
  EXPECT_TRUE(says(error_with(o), "no tokenizer in \"the-model\": "));
  o = options();
  o.output_file = folder_ / "no/such/file";
  EXPECT_EQ(error_with(o), "--output-file " + (folder_ / "no/such/file") + ": cannot be written");
}

// If several options are wrong, the error names the first of these.
TEST_F(ServingRun, NamesTheFirstWrongOption) {
  using Set = std::function<void(ServingBenchOptions&)>;
  struct Option {
    const char* name;
    Set wrong, right;
  };
  const Option all[] = {
      {"--dataset-name", [](auto& o) { o.dataset.name = "x"; },
       [](auto& o) { o.dataset.name = "sharegpt"; }},
      {"--num-prompts", [](auto& o) { o.dataset.n_prompts = 0; },
       [](auto& o) { o.dataset.n_prompts = 4; }},
      {"--random-input-len", [](auto& o) { o.dataset.input_tokens = 0; },
       [](auto& o) { o.dataset.input_tokens = 1; }},
      {"--random-output-len", [](auto& o) { o.dataset.output_tokens = 0; },
       [](auto& o) { o.dataset.output_tokens = 1; }},
      {"--warmup-requests", [](auto& o) { o.warmup_requests = -1; },
       [](auto& o) { o.warmup_requests = 0; }},
      {"--sharegpt-output-len", [](auto& o) { o.dataset.sharegpt_output_tokens = 3; },
       [](auto& o) { o.dataset.sharegpt_output_tokens = 4; }},
      {"--sharegpt-context-len", [](auto& o) { o.dataset.sharegpt_context = 3; },
       [](auto& o) { o.dataset.sharegpt_context = {}; }},
      {"--max-concurrency", [](auto& o) { o.max_concurrency = 0; },
       [](auto& o) { o.max_concurrency = 1; }},
      {"--concurrency",
       [](auto& o) {
         o.concurrency = {4, 5};
       },
       [](auto& o) { o.concurrency = {4}; }},
      {"--slo-tps-user", [](auto& o) { o.slo_tokens_a_user = {0}; },
       [](auto& o) { o.slo_tokens_a_user.clear(); }},
      {"--random-range-ratio", [](auto& o) { o.dataset.range_ratio = 2; },
       [](auto& o) { o.dataset.range_ratio = 1; }},
      {"--request-rate", [](auto& o) { o.request_rate = 0; }, [](auto& o) { o.request_rate = 1; }},
      {"--port", [](auto& o) { o.port = 0; }, [](auto& o) { o.port = {}; }},
      {"--tokenize-prompt", [](auto& o) { o.dataset.sends_ids = true; },
       [](auto& o) { o.dataset.sends_ids = false; }},
      {"--backend", [](auto& o) { o.backend = "x"; }, [](auto& o) { o.backend = "vllm"; }},
      {"--base-url", [](auto& o) { o.base_url = "x"; }, [](auto& o) { o.base_url = ""; }},
      {"--extra-request-body", [](auto& o) { o.extra_request_body = "1"; },
       [](auto& o) { o.extra_request_body = ""; }},
      {"--output-file", [](auto& o) { o.output_file = "/no/such/file"; },
       [&](auto& o) { o.output_file = folder_ / "out"; }},
      {"no tokenizer", [](auto& o) { o.tokenizer = "/no/such"; },
       [](auto& o) { o.tokenizer = kTinyR1; }}};
  ServingBenchOptions o = options();
  for (const Option& option : all) option.wrong(o);
  for (const Option& option : all) {
    EXPECT_TRUE(error_with(o).starts_with(option.name)) << option.name << ": " << error_with(o);
    option.right(o);
  }
  EXPECT_EQ(error_with(o), "no error");
}

TEST_F(ServingRun, NamesTheOutputFile) {
  const auto here = std::filesystem::current_path();
  std::filesystem::current_path(folder_.path());
  ServingBenchOptions o = options();
  o.output_file = "";
  o.backend = "vllm-chat";
  o.dataset.n_prompts = 12;
  const auto day = [] {
    const std::time_t now = std::time(nullptr);
    char text[8];
    std::strftime(text, sizeof(text), "%m%d", std::localtime(&now));
    return std::string(text);
  };
  std::string before, after;
  do {  // again if midnight falls between
    before = day();
    EXPECT_EQ(error_with(o), "no error");
    o.dataset.name = "random";
    o.dataset.input_tokens = 34;
    o.dataset.output_tokens = 56;
    EXPECT_EQ(error_with(o), "no error");
    after = day();
  } while (before != after);
  EXPECT_TRUE(std::filesystem::exists("vllm-chat_" + before + "_12_34_56.jsonl"));
  std::filesystem::current_path(here);
  EXPECT_TRUE(std::filesystem::exists(folder_ / ("vllm-chat_" + before + "_12_sharegpt.jsonl")));
}

TEST_F(ServingRun, SaysHowManyTokensThereAre) {
  EXPECT_EQ(error_with(options()), "no error");
  EXPECT_EQ(said_, (std::vector<std::string>{"#Input tokens: 2", "#Output tokens: 6"}));
}

TEST_F(ServingRun, RoundsOfALoad) {
  ServingBenchOptions o = options();
  o.dataset.name = "random-ids";
  o.dataset.n_prompts = 100;
  o.dataset.input_tokens = o.dataset.output_tokens = 3;
  const ServingBench bench(o, [](const std::string&) {});
  EXPECT_EQ(bench.n_requests(), 100U);
  EXPECT_EQ(bench.model(), "the-model");
  for (const auto& [users, wanted] :
       {std::pair{1, 16}, std::pair{4, 16}, {5, 20}, {24, 96}, {25, 100}, {26, 100}})
    EXPECT_EQ(bench.requests_for(users), static_cast<size_t>(wanted)) << users;
  o.dataset.n_prompts = 10;
  EXPECT_EQ(ServingBench(o, [](const std::string&) {}).requests_for(1), 10U);
}

// Each try is a run of the benchmark: only these are made.
TEST(HighestThat, TriesTheseLoads) {
  struct Case {
    int most, limit;
    std::vector<int> tries;
    int found;
  };
  for (const Case& c : {Case{100, 50, {1, 2, 4, 8, 16, 32, 64, 48, 56, 52, 50}, 50},
                        Case{100, 0, {1}, 0}, Case{1, 1, {1}, 1}, Case{3, 3, {1, 2, 3}, 3},
                        Case{3, 2, {1, 2, 3}, 2}, Case{8, 7, {1, 2, 4, 8, 6, 7}, 7},
                        Case{10, 10, {1, 2, 4, 8, 10}, 10}, Case{10, 8, {1, 2, 4, 8, 10, 9}, 8},
                        Case{64, 40, {1, 2, 4, 8, 16, 32, 64, 48, 40, 44, 42}, 40},
                        Case{64, 42, {1, 2, 4, 8, 16, 32, 64, 48, 40, 44, 42}, 42}}) {
    std::vector<int> tries;
    EXPECT_EQ(highest_that(c.most,
                           [&](int n) {
                             tries.push_back(n);
                             return n <= c.limit;
                           }),
              c.found);
    EXPECT_EQ(tries, c.tries) << c.most << " " << c.limit;
  }
}

// The port of each backend, from the address of a server that is not there.
TEST_F(ServingRun, BackendsHaveTheirPorts) {
  for (const auto& [backend, port] : {std::pair{"sglang", "30000"},
                                      std::pair{"sglang-native", "30000"},
                                      {"sglang-oai", "30000"},
                                      {"sglang-oai-chat", "30000"},
                                      {"vllm", "8000"},
                                      {"vllm-chat", "30000"},
                                      {"lmdeploy", "23333"},
                                      {"lmdeploy-chat", "30000"}}) {
    ServingBenchOptions o = options();
    o.backend = backend;
    o.host = "127.0.0.77";
    o.model = "";
    EXPECT_TRUE(says(failure_of(o), std::string("http://127.0.0.77:") + port + "/v1/models"));
  }
}

// The path of each backend, and why a run ends when no request of the warm-up succeeds.
TEST_F(ServingRun, BackendsHaveTheirPaths) {
  for (const auto& [backend, path] : {std::pair{"sglang", "/generate"},
                                      std::pair{"sglang-native", "/generate"},
                                      {"sglang-oai", "/v1/completions"},
                                      {"sglang-oai-chat", "/v1/chat/completions"},
                                      {"vllm", "/v1/completions"},
                                      {"vllm-chat", "/v1/chat/completions"},
                                      {"lmdeploy", "/v1/completions"},
                                      {"lmdeploy-chat", "/v1/chat/completions"}}) {
    FakeServer server([](const Client& client) { client.send(whole("503 Busy", "no")); });
    ServingBenchOptions o = options_for(server);
    o.backend = backend;
    o.warmup_requests = 2;
    EXPECT_EQ(failure_of(o),
              "the warm-up failed at http://127.0.0.1:" + server.port() + ": 503 Busy: \"no\"");
    std::vector<std::string> requests = server.requests();
    ASSERT_EQ(requests.size(), 3U) << backend;
    EXPECT_EQ(requests[0].rfind("GET /v1/models HTTP/1.1\r\n", 0), 0U) << requests[0];
    requests.erase(requests.begin());
    for (const std::string& request : requests) {
      EXPECT_EQ(request.rfind(std::string("POST ") + path + " HTTP/1.1\r\n", 0), 0U) << request;
      EXPECT_NE(request.find("tokens\":32,"), std::string::npos) << request;  // 40 are asked for
    }
    EXPECT_EQ(said_.back(), "Starting warmup with 2 sequences...");
  }
}

TEST_F(ServingRun, SaysWhyItHasNoModel) {
  const std::tuple<const char*, const char*, const char*> cases[] = {
      {"200 OK", R"({"data": [{"id": 3}]})", R"( answers 200 OK: "{\"data\": [{\"id\": 3}]}")"},
      {"200 OK", R"({"data": []})", R"( answers 200 OK: "{\"data\": []}")"},
      {"200 OK", "no", " answers 200 OK: \"no\""},
      {"401 Who", R"({"data": [{"id": "m"}]})",
       R"( answers 401 Who: "{\"data\": [{\"id\": \"m\"}]}")"}};
  for (const auto& [status, body, wanted] : cases) {
    FakeServer server([&](const Client& client) { client.send(whole(status, body)); });
    ServingBenchOptions o = options_for(server);
    o.model = "";
    EXPECT_EQ(failure_of(o),
              "http://127.0.0.1:" + server.port() + "/v1/models" + wanted + ": give --model");
  }
}

std::string generated(const std::string& text, int n) {
  return whole("200 OK", R"(data: {"text": ")" + text +
                             R"(", "meta_info": {"completion_tokens": )" + std::to_string(n) +
                             "}}\n\ndata: [DONE]\n\n");
}
std::string completed() {
  return whole("200 OK", "data: {\"choices\": [{\"text\": \"1\"}]}\n\ndata: [DONE]\n\n");
}

// One of the warm-up's requests must succeed; then the cache is emptied, which the server refuses.
TEST_F(ServingRun, EmptiesTheCacheOfEachBackend) {
  for (const auto& [backend, path] : {std::pair{"vllm", "/reset_prefix_cache"},
                                      std::pair{"sglang-oai", "/flush_cache?timeout=60.0"},
                                      {"lmdeploy", "/flush_cache"}}) {
    FakeServer server([](const Client& client) {
      if (client.request.find("cache") != std::string::npos)
        return client.send(whole("400 Bad Request", "why"));
      client.send(client.index == 0 ? whole("503 Busy", "no") : completed());
    });
    ServingBenchOptions o = options_for(server);
    o.backend = backend;
    o.warmup_requests = 2;
    o.flush_cache = true;
    EXPECT_EQ(failure_of(o), "--flush-cache: http://127.0.0.1:" + server.port() + path +
                                 " answers 400 Bad Request: \"why\"");
    EXPECT_EQ(server.requests().back().rfind(std::string("POST ") + path + " HTTP/1.1\r\n", 0), 0U);
    EXPECT_EQ(said_.back(), "Warmup completed with 2 sequences. Starting main benchmark run...");
  }
}

// SGLang says how many tokens speculation has accepted. The run itself waits a second.
TEST_F(ServingRun, ReportsARun) {
  setenv("OPENAI_API_KEY", "the-key", 1);
  FakeServer server([](const Client& client) {
    if (client.request.starts_with("GET /v1/models "))
      return client.send(whole("200 OK", R"({"data": [{"id": "served"}]})"));
    if (client.request.starts_with("POST /flush_cache?timeout=60.0 "))
      return client.send(whole("399 Fine", ""));
    if (client.request.starts_with("GET /server_info "))
      return client.send(whole("200 OK", R"({"internal_states": [{"avg_spec_accept_length": 2.5}],
              "decode": [{"internal_states": [{"avg_spec_accept_length": 1.5}]}]})"));
    if (client.index == 4) return client.send(whole("500 Oops", "first"));
    if (client.index == 5) return client.send(whole("500 Oops", "second"));
    client.send(generated("12", 2));
  });
  ServingBenchOptions o = options_for(server);
  o.model = "";
  o.flush_cache = o.output_details = true;
  ServingBench bench(o, [&](const std::string& line) { said_.push_back(line); });
  EXPECT_EQ(bench.model(), "served");
  const auto start = std::chrono::steady_clock::now();
  const ServingBench::Run run = bench.run(1, 3);
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::seconds(1));
  unsetenv("OPENAI_API_KEY");
  EXPECT_EQ(said_,
            (std::vector<std::string>{
                "#Input tokens: 15", "#Output tokens: 120", "Starting warmup with 1 sequences...",
                "Warmup completed with 1 sequences. Starting main benchmark run..."}));
  const std::vector<std::string> requests = server.requests();
  ASSERT_EQ(requests.size(), 7U);  // model, warm-up, cache, three requests, accept length
  for (const std::string& request : requests)
    EXPECT_NE(request.find("\r\nAuthorization: Bearer the-key\r\n"), std::string::npos);
  EXPECT_NE(requests[3].find("\"max_new_tokens\":40,"), std::string::npos);
  EXPECT_FALSE(run.interrupted);
  EXPECT_EQ(run.first_error, "500 Oops: \"first\"");
  EXPECT_EQ(run.metrics.completed, 1);
  EXPECT_EQ(run.metrics.failed, 2);
  EXPECT_EQ(run.metrics.accept_length, 1.5);
  EXPECT_EQ(run.metrics.output_tokens, 2);
  const ServingSetup setup = {.backend = "sglang",
                              .dataset = "random-ids",
                              .request_rate = std::numeric_limits<double>::infinity(),
                              .concurrency = 1,
                              .sharegpt_output_tokens = {},
                              .input_tokens = 5,
                              .output_tokens = 40,
                              .range_ratio = 1};
  EXPECT_EQ(run.report, report_text(setup, run.metrics));
  EXPECT_EQ(run.json, report_json(setup, run.metrics));
  const std::string line = read_file(o.output_file);
  EXPECT_NE(line.find(R"("input_lens": [5, 5, 5], "output_lens": [2, 0, 0], )"), std::string::npos)
      << line;
  EXPECT_EQ(line.find('\n'), line.size() - 1);
}

}  // namespace
}  // namespace tandem
