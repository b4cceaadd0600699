// Prefill and decode servers over TCP, each an engine of this process: the same text as one engine,
// whatever becomes of the prefill servers.
#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <thread>

#include "prefill/kv_client.h"
#include "prefill/kv_server.h"
#include "tests/error_of.h"
#include "tests/free_address.h"
#include "tests/running_engine.h"
#include "transport/tcp.h"

namespace tandem::test {
namespace {

std::string prompt_text(int first) {
  std::string text = "Tell me. ";
  for (int i = first; i < first + 40; ++i) text += fmt::format("What is {} + {}? ", i, 1000 - i);
  return text + "What is 478 + 356?";
}

int tokens_before_last(int first) {
  return static_cast<int>(question(prompt_text(first)).request.prompt.size()) - 1;
}

// The bytes of a page of tiny-r1's cache.
int64_t key_bytes() {
  static const int64_t bytes = [] {
    LoadedModel loaded({.directory = kTinyR1, .n_threads = 1, .context = 256});
    return loaded.model().key_bytes(loaded.cache());
  }();
  return bytes;
}

KvWelcome welcome(uint64_t model = 77) {
  return {.model = model,
          .key_bytes = key_bytes(),
          .page_size = kPageSize,
          .max_tokens = 2048,
          .cache_type = "bf16",
          .arithmetic = "the same"};
}

class Notes {
 public:
  std::function<void(const std::string&)> taker() {
    return [this](const std::string& line) {
      const std::lock_guard lock(mutex_);
      lines_ += line + "\n";
    };
  }
  std::string lines() const {
    const std::lock_guard lock(mutex_);
    return lines_;
  }

 private:
  mutable std::mutex mutex_;
  std::string lines_;
};

void await(const std::function<bool()>& is_so, const char* what) {
  const auto until = Clock::now() + std::chrono::seconds(20);
  while (!is_so() && Clock::now() < until)
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  ASSERT_TRUE(is_so()) << what;
}

// A prefill server: an engine, and what sends its keys.
struct Prefill {
  explicit Prefill(Transport& transport, KvServer::Options options = {},
                   const KvWelcome& tells = welcome())
      : server(transport, at_a_free_address(std::move(options))) {
    server.begin(*engine, tells);
  }
  ~Prefill() { server.end(); }
  std::string address() const { return fmt::format("127.0.0.1:{}", server.port()); }
  // A step is counted after its keys have been sent.
  void await_computed(int64_t n_tokens) {
    await([&] { return engine->counts().n_computed_tokens >= n_tokens; }, "computed tokens");
    EXPECT_EQ(engine->counts().n_computed_tokens, n_tokens);
  }
  RunningEngine engine{RunningEngine::Options{}};
  KvServer server;
};

// Pages of an answer that has just come may still be in use.
void forget_pages(RunningEngine& engine) {
  await([&] { return engine->counts().scheduler.n_running == 0; }, "no answer is left");
  engine->forget_pages();
}

const std::string& expected(int first) {
  static std::map<int, std::string> texts;
  std::string& text = texts[first];
  if (text.empty()) text = RunningEngine({}).submit(question(prompt_text(first))).get().text;
  return text;
}

TEST(KvTransfer, TextIsThatOfOneServer) {
  const auto transport = tcp_transport();
  Prefill prefill(*transport), second(*transport);
  Notes notes;
  KvClient client(*transport,
                  {.addresses = {prefill.address(), second.address()},
                   .least_tokens = 64,
                   .note = notes.taker()},
                  welcome());
  await([&] { return client.n_up() == 2; }, "both are up");
  RunningEngine decode({.prefixes = &client});
  std::vector<std::future<Ending>> endings;
  int n_tokens = 0;
  for (int i = 0; i < 4; ++i) {
    endings.push_back(decode.submit(question(prompt_text(i * 100))));
    n_tokens += tokens_before_last(i * 100);
  }
  for (int i = 0; i < 4; ++i) {
    const Ending ending = endings[i].get();
    EXPECT_EQ(ending.text, expected(i * 100)) << i;
    EXPECT_EQ(ending.cached_tokens, tokens_before_last(i * 100));
  }
  EXPECT_EQ(decode->counts().n_fetched_tokens, n_tokens);
  for (Prefill* server : {&prefill, &second})
    EXPECT_GT(server->engine->counts().n_computed_tokens, 0) << "both have work";
  EXPECT_TRUE(says(notes.lines(), "is up\n")) << notes.lines();
}

TEST(KvTransfer, PagesThatThePrefillServerHasCostOneToken) {
  const auto transport = tcp_transport();
  Prefill prefill(*transport);
  KvClient client(*transport, {.addresses = {prefill.address()}, .least_tokens = 64}, welcome());
  await([&] { return client.n_up() == 1; }, "it is up");
  RunningEngine decode({.prefixes = &client});
  EXPECT_EQ(decode.submit(question(prompt_text(0))).get().text, expected(0));
  prefill.await_computed(tokens_before_last(0) + 1);
  forget_pages(decode);
  EXPECT_EQ(decode.submit(question(prompt_text(0))).get().text, expected(0));
  prefill.await_computed(tokens_before_last(0) + 2);
}

TEST(KvTransfer, PromptsGoWhereTheirBeginningWasComputed) {
  const auto transport = tcp_transport();
  Prefill first(*transport);
  auto second = std::make_unique<Prefill>(*transport);
  const std::string address = second->address();
  KvClient client(*transport, {.addresses = {first.address(), address}, .least_tokens = 64},
                  welcome());
  await([&] { return client.n_up() == 2; }, "both are up");
  RunningEngine decode({.prefixes = &client});
  // Two prompts at once, until the second server gets one of them.
  int asked = 0;
  for (int i = 0; i < 1000 && client.servers()[1].n_fetches == 0; i += 100) {
    asked = i + 50;
    auto one = decode.submit(question(prompt_text(i)));
    auto other = decode.submit(question(prompt_text(asked)));
    one.get();
    EXPECT_EQ(other.get().text, expected(asked));
  }
  ASSERT_EQ(client.servers()[1].n_fetches, 1);
  second->await_computed(tokens_before_last(asked) + 1);
  EXPECT_EQ(client.servers()[1].n_pages, (tokens_before_last(asked) + kPageSize - 1) / kPageSize);
  forget_pages(decode);
  EXPECT_EQ(decode.submit(question(prompt_text(asked))).get().text, expected(asked));
  second->await_computed(tokens_before_last(asked) + 2);  // it has the other keys
  EXPECT_EQ(client.servers()[1].n_fetches, 2);
  for (const PrefixServerStatus& server : client.servers()) {
    EXPECT_TRUE(server.is_up);
    EXPECT_EQ(server.n_pending_tokens, 0);
    EXPECT_EQ(server.n_failures, 0);
  }

  // One that comes back has lost its cache.
  second.reset();
  await([&] { return client.n_up() == 1; }, "it is down");
  EXPECT_FALSE(client.servers()[1].is_up);
  second = std::make_unique<Prefill>(*transport, KvServer::Options{.address = address});
  await([&] { return client.n_up() == 2; }, "it is up again");
  forget_pages(decode);
  EXPECT_EQ(decode.submit(question(prompt_text(asked))).get().text, expected(asked));
  EXPECT_EQ(client.servers()[1].n_fetches, 2) << "the first server is as good";
  EXPECT_EQ(client.servers()[1].n_failures, 0) << "it said goodbye";
}

TEST(KvTransfer, ServersThatEndAreDoneWithout) {
  const auto transport = tcp_transport();
  auto prefill = std::make_unique<Prefill>(*transport);
  const std::string address = prefill->address();
  Notes notes;
  KvClient client(*transport, {.addresses = {address}, .least_tokens = 64, .note = notes.taker()},
                  welcome());
  await([&] { return client.n_up() == 1; }, "it is up");
  RunningEngine decode({.prefixes = &client});
  EXPECT_EQ(decode.submit(question(prompt_text(0))).get().text, expected(0));
  // It ends while it computes.
  auto cut = decode.submit(question(prompt_text(100)));
  await([&] { return prefill->engine->counts().n_steps > 3; }, "it computes");
  prefill.reset();
  EXPECT_EQ(cut.get().text, expected(100));
  await([&] { return client.n_up() == 0; }, "it is down");
  EXPECT_FALSE(client.pays(1000));
  const int64_t n_fetched = decode->counts().n_fetched_tokens;
  EXPECT_EQ(decode.submit(question(prompt_text(200))).get().text, expected(200));
  EXPECT_EQ(decode->counts().n_fetched_tokens, n_fetched) << "all was computed here";
  Prefill again(*transport, {.address = address});
  await([&] { return client.n_up() == 1; }, "it is up again");
  EXPECT_EQ(decode.submit(question(prompt_text(300))).get().text, expected(300));
  EXPECT_GT(decode->counts().n_fetched_tokens, n_fetched);
}

TEST(KvTransfer, AServerThatIsDownIsPassedOver) {
  const auto transport = tcp_transport();
  auto first = std::make_unique<Prefill>(*transport);
  Prefill second(*transport);
  KvClient client(*transport,
                  {.addresses = {first->address(), second.address()}, .least_tokens = 64},
                  welcome());
  await([&] { return client.n_up() == 2; }, "both are up");
  first.reset();
  await([&] { return client.n_up() == 1; }, "the first one is down");
  RunningEngine decode({.prefixes = &client});
  EXPECT_EQ(decode.submit(question(prompt_text(0))).get().text, expected(0));
  EXPECT_EQ(client.servers()[1].n_fetches, 1);
}

TEST(KvTransfer, OtherModelsPagesAndSecretsAreNotUsed) {
  const auto transport = tcp_transport();
  KvWelcome wide = welcome();
  wide.key_bytes += 64;
  KvWelcome fp8 = welcome();
  fp8.cache_type = "fp8";
  Prefill other_model(*transport, {}, welcome(78)), other_pages(*transport, {}, wide),
      other_type(*transport, {}, fp8),
      other_secret(*transport, {.secret = Secret("a secret of sixteen")});
  struct Case {
    Prefill& server;
    Secret secret;
    const char* says;
  };
  for (const auto& [server, secret, text] :
       {Case{other_model, {}, "another model"}, Case{other_pages, {}, "give both the same --kv"},
        Case{other_type, {}, " in fp8, and this server's of 64 and"},
        Case{other_secret, Secret("another of sixteen"), "another secret"},
        Case{other_secret,
             {},
             "has a secret, and this program none: give both the same --kv-secret"}}) {
    Notes notes;
    KvClient client(*transport,
                    {.addresses = {server.address()}, .secret = secret, .note = notes.taker()},
                    welcome());
    await([&] { return !notes.lines().empty(); }, "a note");
    EXPECT_TRUE(says(notes.lines(), text)) << notes.lines();
    EXPECT_EQ(client.n_up(), 0);
  }
  Notes notes;
  KvWelcome elsewhere = welcome();
  elsewhere.arithmetic = "other kernels";
  KvClient client(*transport,
                  {.addresses = {other_secret.address()},
                   .secret = Secret("a secret of sixteen"),
                   .note = notes.taker()},
                  elsewhere);
  await([&] { return client.n_up() == 1; }, "with the secret");
  EXPECT_TRUE(says(notes.lines(), "answers may differ")) << notes.lines();
  EXPECT_TRUE(says(error_of([&] { KvServer(*transport, {.address = "0.0.0.0:0"}); }),
                   "give both servers the same --kv-secret"));
}

// What many workers make of the text is cut on both sides.
TEST(KvTransfer, LongTextsAreCompared) {
  const auto transport = tcp_transport();
  KvWelcome of_many = welcome();
  of_many.arithmetic = std::string(5000, 'w');
  Prefill prefill(*transport, {}, of_many);
  Notes notes;
  KvClient client(*transport, {.addresses = {prefill.address()}, .note = notes.taker()}, of_many);
  await([&] { return client.n_up() == 1 && !notes.lines().empty(); }, "it is up");
  EXPECT_TRUE(says(notes.lines(), "is up\n")) << notes.lines();
}

// Bytes that are no messages end their connection, and nothing else.
TEST(KvTransfer, StrangersAreClosedOut) {
  const auto transport = tcp_transport();
  Prefill prefill(*transport);
  class Closed final : public MessageSink {
    std::span<std::byte> place(const MessageHeader&) override { throw ProtocolError("answered"); }
    void arrived(const MessageHeader&) override {}
  } sink;
  const std::vector<std::byte> bytes(sizeof(WorkerHello));
  const MessageBytes body = bytes;
  for (const MessageKind kind :
       {MessageKind::kRequest, MessageKind::kCancel, MessageKind::kProof}) {
    const auto connection = transport->connect(prefill.address(), std::chrono::seconds(2));
    connection->send(kind, 1, std::span(&body, 1));
    await(
        [&] {
          try {
            connection->progress(sink);
          } catch (const ConnectionError&) {
            return true;
          }
          return false;
        },
        "the connection is closed");
  }
  KvClient client(*transport, {.addresses = {prefill.address()}}, welcome());
  await([&] { return client.n_up() == 1; }, "others are served");
}

}  // namespace
}  // namespace tandem::test
