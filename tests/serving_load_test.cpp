// The client of `tandem bench serving`: the bytes that it sends, what it reads from servers that
// answer in pieces, too much, late or not at all, and how many requests are under way.
#include "bench/serving/serving_load.h"

#include <fcntl.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <csignal>
#include <fstream>
#include <iterator>
#include <limits>
#include <numeric>

#include "tests/error_of.h"
#include "tests/fake_server.h"

namespace tandem {
namespace {

using test::chunk;
using test::FakeServer;
using test::kStreamHead;
using test::whole;
using Client = FakeServer::Client;

ServingLoadOptions options_for(const std::string& port) {
  ServingLoadOptions o;
  o.server = {"127.0.0.1", port, ""};
  o.model = "m";
  o.rate = std::numeric_limits<double>::infinity();
  return o;
}

std::vector<ServingRequest> prompts(int n) {
  std::vector<ServingRequest> requests;
  for (int i = 0; i < n; ++i) requests.push_back({"p" + std::to_string(i), {}, 10 + i, 20 + i});
  return requests;
}

ServingLoadResult load(const ServingLoadOptions& options, int n) {
  NumpyRandom numpy(1);
  return run_load(options, prompts(n), numpy);
}

// The only output of one request that is answered so.
ServingOutput answered(const FakeServer::Answer& answer) {
  FakeServer server(answer);
  return load(options_for(server.port()), 1).outputs.at(0);
}
ServingOutput answered_with(const std::string& bytes) {
  return answered([&](const Client& client) { client.send(bytes); });
}

void pause(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

std::string event(const std::string& text) {
  return R"(data: {"choices": [{"text": ")" + text + "\"}]}\n\n";
}

TEST(ServingLoad, SendsTheseBytes) {
  const auto sent = [](ServingApi api, const std::string& key, const std::string& prefix) {
    FakeServer server([](const Client& client) { client.send(whole("503 Busy", "")); });
    ServingLoadOptions o = options_for(server.port());
    o.api = api;
    o.api_key = key;
    o.server.prefix = prefix;
    load(o, 1);
    std::string request = server.requests().at(0);
    const size_t at = request.find(server.port());
    return request.replace(at, server.port().size(), "PORT");
  };
  EXPECT_EQ(sent(ServingApi::kCompletions, "", ""),
            "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\nAccept: */*\r\n"
            "Connection: close\r\nContent-Type: application/json\r\nContent-Length: 105\r\n\r\n"
            R"({"model":"m","prompt":"p0","best_of":1,"max_tokens":20,"stream":true,)"
            R"("temperature":0.0,"ignore_eos":true})");
  EXPECT_EQ(sent(ServingApi::kChat, "the-key", "/a/b"),
            "POST /a/b/v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\nAccept: */*\r\n"
            "Connection: close\r\nAuthorization: Bearer the-key\r\n"
            "Content-Type: application/json\r\nContent-Length: 134\r\n\r\n"
            R"({"model":"m","messages":[{"role":"user","content":"p0"}],)"
            R"("max_completion_tokens":20,"stream":true,"temperature":0.0,"ignore_eos":true})");
  EXPECT_EQ(sent(ServingApi::kGenerate, "", ""),
            "POST /generate HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\nAccept: */*\r\n"
            "Connection: close\r\nContent-Type: application/json\r\nContent-Length: 196\r\n\r\n"
            R"({"text":"p0","sampling_params":{"temperature":0.0,"max_new_tokens":20,)"
            R"("ignore_eos":true},"stream":true,"lora_path":null,"return_logprob":false,)"
            R"("return_routed_experts":false,"logprob_start_len":-1})");
}

TEST(ServingLoad, BodiesCarryTheOptions) {
  ServingLoadOptions o;
  o.api = ServingApi::kGenerate;
  o.streams = o.ignore_eos = false;
  o.logprobs = true;
  EXPECT_EQ(request_body(o, {"a", {}, 1, 7}),
            R"({"text":"a","sampling_params":{"temperature":0.0,"max_new_tokens":7,)"
            R"("ignore_eos":false},"stream":false,"lora_path":null,"return_logprob":true,)"
            R"("return_routed_experts":false,"logprob_start_len":-1})");
  o.api = ServingApi::kCompletions;
  o.model = "x";
  EXPECT_EQ(request_body(o, {"a", {}, 1, 7}),
            R"({"model":"x","prompt":"a","best_of":1,"max_tokens":7,"stream":false,)"
            R"("temperature":0.0,"ignore_eos":false})");
}

// Events arrive in pieces, several at once, with both kinds of line ends, and the last without one.
TEST(ServingLoad, ReadsLinesHoweverTheyArrive) {
  const ServingOutput o = answered([](const Client& client) {
    client.send(kStreamHead);
    const std::string all = event("a") + event("b") +
                            "data: {\"choices\": [{\"text\": \"c\"}]}\r\n" +
                            "\r\ndata: {\"choices\": [{\"text\": \"d\"}]}";
    size_t begin = 0;
    for (const size_t end : {size_t{3}, size_t{20}, size_t{80}, size_t{81}, all.size()}) {
      client.send(chunk(all.substr(begin, end - begin)));
      pause(3);
      begin = end;
    }
    client.send(chunk(""));
  });
  EXPECT_TRUE(o.success) << o.error;
  EXPECT_EQ(o.text, "abcd");
  EXPECT_EQ(o.itls.size(), 3U);
  EXPECT_EQ(o.prompt_tokens, 10);
  EXPECT_EQ(o.output_tokens, 20);
}

// Beast refuses bodies of more than 8 MB unless told otherwise; a line may have 10 MiB.
TEST(ServingLoad, ReadsLongAnswersAndLongLines) {
  const std::string three_million(3'000'000, 'x');
  const ServingOutput streamed = answered([&](const Client& client) {
    client.send(kStreamHead);
    for (int i = 0; i < 3; ++i) client.send(chunk(event(three_million)));
    client.send(chunk(""));
  });
  EXPECT_TRUE(streamed.success) << streamed.error;
  EXPECT_EQ(streamed.text.size(), 9'000'000U);

  const auto line_of = [](size_t n_bytes) {
    const std::string begin = R"({"choices": [{"text": ")", end = R"("}]})";
    return begin + std::string(n_bytes - begin.size() - end.size(), 'y') + end;
  };
  constexpr size_t kLimit = 10 << 20;
  const ServingOutput longest = answered_with(whole("200 OK", line_of(kLimit)));
  EXPECT_TRUE(longest.success) << longest.error;
  EXPECT_EQ(longest.text.size(), kLimit - 27);
  const ServingOutput longer = answered_with(whole("200 OK", line_of(kLimit + 1)));
  EXPECT_FALSE(longer.success);
  EXPECT_EQ(longer.error, "a line has more than 10485760 bytes");
}

TEST(ServingLoad, ReadsLongHeaders) {
  const auto with_header = [](size_t n_bytes) {
    const std::string begin = "HTTP/1.1 200 OK\r\nX-Long: ", end = "\r\nContent-Length: 12\r\n\r\n";
    return answered_with(begin + std::string(n_bytes - begin.size() - end.size(), 'h') + end +
                         "data: [DONE]");
  };
  EXPECT_EQ(with_header(65'000).error, "");
  EXPECT_NE(with_header(66'000).error, "");
}

TEST(ServingLoad, SaysWhyARequestFailed) {
  const std::pair<std::string, std::string> cases[] = {
      {whole("503 Service Unavailable", R"({"error": {"message": "too many"}})"),
       "503 Service Unavailable: \"too many\""},
      {whole("429 Slow Down", R"({"error": {"code": 1}})"), "429 Slow Down: \"\""},
      {whole("400 Bad Request", R"({"error": "text"})"),
       R"(400 Bad Request: "{\"error\": \"text\"}")"},
      {whole("500 Oops", "data: 1\n"), R"(500 Oops: "data: 1\n")"},
      {whole("201 Created", event("a")),
       R"(201 Created: "data: {\"choices\": [{\"text\": \"a\"}]}\n\n")"},
      {whole("404 Not Found", "[]"), "404 Not Found: \"[]\""},
      {whole("200 OK", ""), "the answer is empty"},
      {whole("200 OK", event("a") + "data: 3\n"), "a line is no JSON object: \"3\""},
      {"", "end of stream [beast.http:1]"},
      {std::string(kStreamHead) + chunk(event("a")), "partial message [beast.http:2]"},
      {"SSH-2.0\r\n\r\n", "bad version [beast.http:12]"}};
  for (const auto& [answer, wanted] : cases) {
    const ServingOutput o = answered_with(answer);
    EXPECT_FALSE(o.success) << wanted;
    EXPECT_FALSE(o.interrupted) << wanted;
    EXPECT_EQ(o.error.substr(0, wanted.find(" [beast")), wanted.substr(0, wanted.find(" [beast")));
    EXPECT_EQ(o.prompt_tokens, 10);
    EXPECT_EQ(o.output_tokens, 20);
  }
  std::string closed_port;
  {
    FakeServer server([](const Client&) {});
    closed_port = server.port();
  }
  const ServingLoadResult nobody = load(options_for(closed_port), 2);
  for (const ServingOutput& o : nobody.outputs)
    EXPECT_TRUE(says(o.error, "Connection refused")) << o.error;
}

// Each answer repeats its prompt, so that outputs are seen to stay in the order of the requests.
void echo(const Client& client) {
  const size_t at = client.request.find("\"prompt\":\"") + 10;
  client.send(whole("200 OK", event(client.request.substr(at, client.request.find('"', at) - at))));
}

TEST(ServingLoad, OneAtATimeKeepsTheOrder) {
  FakeServer server([](const Client& client) {
    pause(client.index == 0 ? 20 : 1);
    echo(client);
  });
  ServingLoadOptions o = options_for(server.port());
  o.most_at_once = 1;
  const ServingLoadResult result = load(o, 4);
  double altogether = 0;
  for (size_t i = 0; i < 4; ++i) {
    const std::string prompt = "p" + std::to_string(i);
    EXPECT_NE(server.requests().at(i).find(prompt), std::string::npos);
    EXPECT_EQ(result.outputs.at(i).text, prompt);
    EXPECT_EQ(result.outputs.at(i).prompt_tokens, 10 + static_cast<int>(i));
    EXPECT_EQ(result.outputs.at(i).output_tokens, 20 + static_cast<int>(i));
    altogether += result.outputs.at(i).latency;
  }
  EXPECT_FALSE(result.interrupted);
  EXPECT_LE(altogether, result.seconds);  // each latency counts from the request's own start
  EXPECT_GE(result.outputs[0].latency, 0.02);
}

// No request is answered before as many are under way as may be, and then all of them are.
TEST(ServingLoad, KeepsAsManyUnderWayAsAllowed) {
  for (const int most : {0, 2, 3}) {
    const int at_once = most > 0 ? most : 6;
    std::mutex mutex;
    std::condition_variable changed;
    int arrived = 0, running = 0, peak = 0;
    FakeServer server([&](const Client& client) {
      std::unique_lock lock(mutex);
      peak = std::max(peak, ++running);
      const int round_end = (++arrived + at_once - 1) / at_once * at_once;
      changed.notify_all();
      EXPECT_TRUE(
          changed.wait_for(lock, std::chrono::seconds(20), [&] { return arrived >= round_end; }));
      --running;
      lock.unlock();
      echo(client);
    });
    ServingLoadOptions o = options_for(server.port());
    o.most_at_once = most;
    const ServingLoadResult result = load(o, 6);
    for (const ServingOutput& output : result.outputs) EXPECT_TRUE(output.success) << output.error;
    EXPECT_EQ(peak, at_once);
  }
}

TEST(ServingLoad, TimesHoldWhatTheServerWaited) {
  FakeServer server([](const Client& client) {
    pause(30);
    client.send(kStreamHead);
    client.send(chunk(event("a")));
    pause(20);
    client.send(chunk(event("b")));
    pause(10);
    client.send(chunk("data: [DONE]\n\n") + chunk(""));
  });
  const ServingLoadResult result = load(options_for(server.port()), 1);
  const ServingOutput& o = result.outputs.at(0);
  ASSERT_TRUE(o.success) << o.error;
  ASSERT_EQ(o.itls.size(), 1U);
  EXPECT_GE(o.ttft, 0.03);
  EXPECT_GE(o.ttft + o.itls[0], 0.05);
  EXPECT_GE(o.latency, 0.06);
  EXPECT_LE(o.ttft + o.itls[0], o.latency);
  EXPECT_LE(o.latency, result.seconds);
}

// A finite rate draws a gap after each request; requests that come at once draw none.
TEST(ServingLoad, DrawsTheGapsBetweenArrivals) {
  FakeServer server(echo);
  ServingLoadOptions o = options_for(server.port());
  o.rate = 100;
  NumpyRandom numpy(3), same(3);
  const ServingLoadResult result = run_load(o, prompts(4), numpy);
  double gaps = 0;
  for (int i = 0; i < 4; ++i) gaps += same.exponential(0.01);
  EXPECT_GE(result.seconds, gaps);
  for (const ServingOutput& output : result.outputs) EXPECT_TRUE(output.success) << output.error;
  EXPECT_EQ(numpy.integer(0, 1 << 30), same.integer(0, 1 << 30));
  o.rate = std::numeric_limits<double>::infinity();
  run_load(o, prompts(2), numpy);
  EXPECT_EQ(numpy.integer(0, 1 << 30), same.integer(0, 1 << 30));
}

// Before the user interrupts, one request succeeded and one was refused; one is not answered and
// one was not sent.
TEST(ServingLoad, AnInterruptEndsWhatIsUnderWay) {
  FakeServer server([](const Client& client) {
    if (client.index == 0) return echo(client);
    if (client.index == 1) return client.send(whole("503 Busy", "no"));
    kill(getpid(), SIGINT);
    client.wait_until_closed();
  });
  ServingLoadOptions o = options_for(server.port());
  o.most_at_once = 1;
  const ServingLoadResult result = load(o, 4);
  EXPECT_TRUE(result.interrupted);
  EXPECT_EQ(server.requests().size(), 3U);
  ASSERT_EQ(result.outputs.size(), 4U);
  EXPECT_TRUE(result.outputs[0].success);
  EXPECT_EQ(result.outputs[1].error, "503 Busy: \"no\"");
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(result.outputs[i].interrupted, i >= 2) << i;
    EXPECT_EQ(result.outputs[i].error.empty(), i != 1) << i;
  }
}

TEST(ServingLoad, AnInterruptEndsTheWaitForArrivals) {
  FakeServer server([](const Client& client) {
    echo(client);
    kill(getpid(), SIGINT);
  });
  ServingLoadOptions o = options_for(server.port());
  o.rate = 1e-4;
  NumpyRandom numpy(2), same(2);
  ASSERT_GT(same.exponential(1e4), 3000);
  const ServingLoadResult result = run_load(o, prompts(2), numpy);
  EXPECT_TRUE(result.interrupted);
  EXPECT_EQ(server.requests().size(), 1U);
  EXPECT_TRUE(result.outputs.at(1).interrupted);
  EXPECT_LT(result.seconds, 1000);
}

class StandardError {  // into a file while this lives
 public:
  StandardError()
      : path_(testing::TempDir() + "serving_stderr_" + std::to_string(getpid())), saved_(dup(2)) {
    std::fflush(stderr);
    const int file = open(path_.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600);
    dup2(file, 2);
    close(file);
  }
  ~StandardError() {
    std::fflush(stderr);
    dup2(saved_, 2);
    close(saved_);
    std::remove(path_.c_str());
  }
  std::string text() const {
    std::ifstream file(path_);
    return {std::istreambuf_iterator<char>(file), {}};
  }

 private:
  const std::string path_;
  const int saved_;
};

TEST(ServingLoad, ShowsProgressUntilTheEnd) {
  std::string shown;
  {
    const StandardError out;
    FakeServer server([&](const Client& client) {
      for (int i = 0; client.index == 1 && i < 2000; ++i) {
        if (out.text().find("\r1 of 2 requests ended") != std::string::npos) break;
        pause(5);
      }
      echo(client);
    });
    ServingLoadOptions o = options_for(server.port());
    o.shows_progress = true;
    load(o, 2);
    shown = out.text();
  }
  EXPECT_EQ(shown.rfind("\r0 of 2 requests ended", 0), 0U) << shown;
  EXPECT_NE(shown.find("\r1 of 2 requests ended"), std::string::npos) << shown;
  EXPECT_EQ(shown.back(), '\n');
}

TEST(ServingLoad, SaysNothingUnlessAsked) {
  const StandardError out;
  FakeServer server(echo);
  load(options_for(server.port()), 1);
  EXPECT_EQ(out.text(), "");
}

TEST(ServingLoad, TakesAllTheSocketsItMay) {
  struct rlimit before {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  struct rlimit few = before;
  few.rlim_cur = 64;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  FakeServer server(echo);
  load(options_for(server.port()), 1);
  struct rlimit after {};
  getrlimit(RLIMIT_NOFILE, &after);
  setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_EQ(after.rlim_cur, before.rlim_max);
  EXPECT_EQ(after.rlim_max, before.rlim_max);
}

TEST(ServingLoad, AsksOutsideTheLoad) {
  std::string port;
  {
    FakeServer server([](const Client& client) {
      if (client.index == 0) client.send(whole("418 Tea Pot", "short and stout"));
    });
    port = server.port();
    ServingLoadOptions o = options_for(port);
    o.server.prefix = "/p";
    o.api_key = "k";
    const ServerReply reply = ask_server(o, "GET", "/v1/models");
    EXPECT_EQ(reply.status, 418);
    EXPECT_EQ(reply.reason, "Tea Pot");
    EXPECT_EQ(reply.body, "short and stout");
    EXPECT_EQ(server.requests().at(0),
              "GET /p/v1/models HTTP/1.1\r\nHost: 127.0.0.1:" + port +
                  "\r\nAccept: */*\r\nConnection: close\r\nAuthorization: Bearer k\r\n"
                  "Content-Type: application/json\r\nContent-Length: 0\r\n\r\n");
    try {
      ask_server(o, "POST", "/x");
      ADD_FAILURE() << "a closed connection must be an error";
    } catch (const std::runtime_error& error) {
      EXPECT_TRUE(
          says(error.what(), "no answer from http://127.0.0.1:" + port + "/p/x: end of stream"));
    }
  }
  try {
    ask_server(options_for(port), "GET", "/x");
    ADD_FAILURE() << "a closed port must be an error";
  } catch (const std::runtime_error& error) {
    EXPECT_EQ(std::string(error.what()),
              "no answer from http://127.0.0.1:" + port +
                  "/x: Connection refused: start the server, or correct --host, --port or "
                  "--base-url");
  }
}

TEST(ServingLoad, ReadsAddresses) {
  struct Case {
    const char *url, *host, *port, *prefix;
  };
  for (const Case& c : {Case{"http://a", "a", "80", ""},
                        {"http://a/", "a", "80", ""},
                        {"http://a:1", "a", "1", ""},
                        {"http://a:65535//", "a", "65535", ""},
                        {"http://a.b:80/c/d", "a.b", "80", "/c/d"},
                        {"http://::1:9/x", "::1", "9", "/x"}}) {
    const ServerAddress address = parse_address(c.url);
    EXPECT_EQ(address.host, c.host) << c.url;
    EXPECT_EQ(address.port, c.port) << c.url;
    EXPECT_EQ(address.prefix, c.prefix) << c.url;
  }
  for (const char* url : {"http://", "http:///x", "http://a:", "http://a:/x", "http://a:1x"})
    EXPECT_EQ(error_of([&] { parse_address(url); }),
              "--base-url " + std::string(url) + ": must be http://HOST:PORT");
}

}  // namespace
}  // namespace tandem
