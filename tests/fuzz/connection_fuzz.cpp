// A whole connection: bytes of several requests in pieces of any length, as from a socket, and the
// answers of the real server, with an engine or while it is loading. Input: a byte that chooses
// between these two, a byte for the lengths of the pieces, the bytes of the requests.
// clang-format off
#include "http/connection.h"  // works around a defect of Boost 1.74 (http/awaitable.h)
// clang-format on

#include <sys/socket.h>
#include <unistd.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "server/service.h"
#include "tests/fuzz/http_messages.h"
#include "tests/fuzz/simulated_engine.h"

namespace {

using namespace tandem;
using namespace tandem::fuzz;
namespace asio = boost::asio;

struct World {
  SimulatedEngine simulated;
  Service running{simulated.tokenizer(),
                  std::make_unique<ChatFormat>(SimulatedEngine::directory(), simulated.tokenizer()),
                  {},
                  {.model_id = "m", .root = "r", .api_key = ""}};
  Service loading{
      simulated.tokenizer(), nullptr, {}, {.model_id = "m", .root = "r", .api_key = ""}};
  // One thread parses and sends, which is faster than passing work to another thread.
  asio::io_context io{1};
  ConnectionContext with_engine{
      .handler = running, .workers = io.get_executor(), .limits = {.body_bytes = 3000}};
  ConnectionContext without{
      .handler = loading, .workers = io.get_executor(), .limits = {.body_bytes = 3000}};

  World() { running.set_ready(simulated.engine()); }
};

// A connection and its client, which sends in pieces and reads continuously.
class Exchange {
 public:
  Exchange(World& world, ConnectionContext& hub) : io_(world.io) {
    int ends[2];
    check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0, "sockets");
    client_ = ends[0];
    asio::ip::tcp::socket socket(io_);
    socket.assign(asio::ip::tcp::v4(), ends[1]);
    const auto connection = std::make_shared<Connection>(std::move(socket), hub);
    io_.restart();
    asio::co_spawn(
        io_, [connection] { return connection->serve(); },
        [this](const std::exception_ptr& failure) {
          check(!failure, "nothing is thrown");
          has_ended_ = true;
        });
  }
  ~Exchange() { ::close(client_); }
  Exchange(const Exchange&) = delete;

  void send(std::string_view bytes, unsigned pieces) {
    uint32_t random = pieces;
    while (!bytes.empty() && !is_closed_) {
      random = random * 1664525 + 1013904223;
      const size_t n = pieces == 0 ? bytes.size() : 1 + (random >> 16) % pieces;
      const ssize_t sent = ::send(client_, bytes.data(), std::min(n, bytes.size()), MSG_NOSIGNAL);
      if (sent > 0) bytes.remove_prefix(static_cast<size_t>(sent));
      io_.poll();
      receive();
    }
  }

  // Runs until the connection has ended. The client shuts down its side when `enough` returns true
  // for everything received. A server that does not answer shows as a time-out of the fuzzer.
  template <class Enough>
  std::string finish(Enough enough) {
    bool said = false;
    for (size_t seen = SIZE_MAX; !has_ended_;) {
      if (!said && (is_closed_ || (seen != received_.size() && enough(received_)))) {
        shutdown(client_, SHUT_WR);
        said = true;
      }
      seen = received_.size();
      io_.run_one_for(std::chrono::milliseconds(5));
      io_.poll();
      receive();
    }
    io_.run();  // runs the remaining timers
    receive();
    return std::move(received_);
  }

 private:
  void receive() {
    char block[1 << 14];
    ssize_t n = 0;
    while ((n = ::recv(client_, block, sizeof(block), 0)) > 0)
      received_.append(block, static_cast<size_t>(n));
    is_closed_ = is_closed_ || n == 0;
  }

  asio::io_context& io_;
  int client_ = -1;
  bool has_ended_ = false;
  bool is_closed_ = false;  // the server has closed its side
  std::string received_;
};

// Returns whether the stream ended with an error event.
bool breaks_off(const Answer& answer) {
  const std::string& body = answer.message.body;
  const size_t last = body.rfind("data: ");
  return answer.is("text/event-stream") && last != body.npos &&
         body.compare(last, 15, "data: {\"error\":") == 0;
}

void check_contents(const Answer& answer, bool has_body) {
  const std::string& body = answer.message.body;
  if (answer.is("application/json") && has_body) check(nlohmann::json::accept(body), "JSON");
  if (!answer.is("text/event-stream") || !has_body) return;
  check(answer.status == 200, "a stream is no error");
  for (size_t first = 0; first < body.size();) {
    const size_t end = body.find("\n\n", first);
    check(end != body.npos && body.compare(first, 6, "data: ") == 0, "a whole event");
    const std::string data = body.substr(first + 6, end - first - 6);
    check(data == "[DONE]" || nlohmann::json::accept(data), "an event of JSON");
    first = end + 2;
  }
}

void check_answers(const Asked& asked, const Answers& answers) {
  const size_t n_asked = asked.requests.size(), n = answers.whole.size();
  check(!answers.broken, "answers are HTTP");
  check(n <= n_asked + 1, "no more answers than requests and a refusal");
  check(!answers.part_left || n >= n_asked, "answers are whole");
  for (size_t i = 0; i < n; ++i)
    check_contents(answers.whole[i],
                   (i < n_asked ? asked.requests[i].method : asked.refused_method) != "HEAD");
  for (size_t i = 0; i + 1 < n; ++i) check(!answers.whole[i].closes(), "closes with the last one");
  if (n > n_asked) {
    const Answer& refusal = answers.whole.back();
    check(refusal.status >= 400 && refusal.status < 500 && refusal.closes(), "a refusal");
  }
  if (n < n_asked)
    check(n > 0 && (answers.whole.back().closes() || breaks_off(answers.whole.back())),
          "an answer to each request");
  const bool reads_on =
      n > n_asked || n == 0 || !(answers.whole.back().closes() || breaks_off(answers.whole.back()));
  // 413: its body is too long, too, which is seen first.
  if (asked.must_be_refused && reads_on)
    check(n == n_asked + 1 &&
              (answers.whole.back().status == 400 || answers.whole.back().status == 413),
          "what has two meanings is refused");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  static World world;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 2, size - 2);
  const Asked asked = requests_in(bytes);
  const size_t expected = asked.requests.size() + (asked.must_be_refused ? 1 : 0);
  Exchange exchange(world, data[0] % 4 == 0 ? world.without : world.with_engine);
  exchange.send(bytes, data[1]);
  const std::string received = exchange.finish([&](const std::string& so_far) {
    return answers_in(so_far, asked, false).whole.size() >= expected;
  });
  check_answers(asked, answers_in(received, asked, true));
  return 0;
}
