#include "bench/serving/serving_load.h"

#include <fmt/format.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/connect.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http.hpp>
#include <cmath>
#include <deque>
#include <limits>
#include <set>

#include "core/check.h"
#include "core/clock.h"
#include "core/machine_info.h"
#include "io/json.h"

namespace tandem {
namespace {

namespace asio = boost::asio;
namespace http = boost::beast::http;
using asio::ip::tcp;
using boost::system::error_code;
using Parser = http::response_parser<http::string_body>;

constexpr size_t kMaxLineBytes = 10 << 20;  // as in the original
constexpr uint32_t kMaxHeaderBytes = 64 << 10;
constexpr size_t kReadBytes = 64 << 10;

auto into(error_code& error) { return asio::redirect_error(asio::use_awaitable, error); }

const char* path_of(ServingApi api) {
  switch (api) {
    case ServingApi::kCompletions:
      return "/v1/completions";
    case ServingApi::kChat:
      return "/v1/chat/completions";
    case ServingApi::kGenerate:
      return "/generate";
  }
  return "";
}

std::string head_of(const ServingLoadOptions& o, const char* method, const std::string& path,
                    size_t body_bytes) {
  const std::string key =
      o.api_key.empty() ? "" : fmt::format("Authorization: Bearer {}\r\n", o.api_key);
  return fmt::format(
      "{} {}{} HTTP/1.1\r\nHost: {}:{}\r\nAccept: */*\r\nConnection: close\r\n{}Content-Type: "
      "application/json\r\nContent-Length: {}\r\n\r\n",
      method, o.server.prefix, path, o.server.host, o.server.port, key, body_bytes);
}

// The reason of a refusal: OpenAI's error message, or the beginning of the body.
std::string refusal_of(const Parser::value_type& reply) {
  const auto json = nlohmann::json::parse(reply.body(), nullptr, false);
  std::string message = shown(reply.body());
  if (json.is_object() && json.contains("error") && json["error"].is_object())
    message = shown(json["error"].value("message", std::string()));
  return fmt::format("{} {}: {}", reply.result_int(), std::string(reply.reason()), message);
}

tcp::resolver::results_type resolve(asio::io_context& io, const ServerAddress& server) {
  error_code error;
  auto found = tcp::resolver(io).resolve(server.host, server.port, error);
  if (error)
    throw std::runtime_error(
        fmt::format("cannot find the host {}: {}", server.host, error.message()));
  return found;
}

class Load {
 public:
  Load(const ServingLoadOptions& options, std::span<const ServingRequest> requests,
       NumpyRandom& numpy)
      : options_(options),
        requests_(requests),
        numpy_(numpy),
        endpoints_(resolve(io_, options.server)),
        next_arrival_(io_),
        progress_(io_),
        signals_(io_, SIGINT) {}

  ServingLoadResult run() {
    result_.outputs.resize(requests_.size());
    signals_.async_wait([this](error_code error, int) {
      if (!error) interrupt();
    });
    if (options_.shows_progress) show_progress();
    const auto start = Clock::now();
    asio::co_spawn(
        io_, [this] { return arrive(); }, asio::detached);
    io_.run();
    result_.seconds = seconds_since(start);
    if (options_.shows_progress) std::fputs("\n", stderr);
    for (ServingOutput& output : result_.outputs)
      output.interrupted = result_.interrupted && !output.success && output.error.empty();
    return std::move(result_);
  }

 private:
  asio::awaitable<void> arrive() {
    for (size_t i = 0; i < requests_.size() && !result_.interrupted; ++i) {
      due_.push_back(i);
      start_due();
      if (std::isinf(options_.rate)) continue;
      next_arrival_.expires_after(std::chrono::duration_cast<Clock::duration>(
          std::chrono::duration<double>(numpy_.exponential(1 / options_.rate))));
      error_code cancelled;
      co_await next_arrival_.async_wait(into(cancelled));
    }
    all_arrived_ = true;
    end_when_done();
  }

  void start_due() {
    const size_t most =
        options_.most_at_once > 0 ? static_cast<size_t>(options_.most_at_once) : SIZE_MAX;
    while (!due_.empty() && n_running_ < most) {
      const size_t i = due_.front();
      due_.pop_front();
      ++n_running_;
      asio::co_spawn(
          io_, [this, i] { return ask(requests_[i], result_.outputs[i]); },
          [this](const std::exception_ptr&) {
            --n_running_;
            ++n_ended_;
            start_due();
            end_when_done();
          });
    }
  }

  void end_when_done() {
    if (!all_arrived_ || n_running_ > 0 || !due_.empty()) return;
    error_code ignored;
    signals_.cancel(ignored);
    progress_.cancel(ignored);
  }

  asio::awaitable<void> ask(const ServingRequest& request, ServingOutput& output) {
    output.prompt_tokens = request.prompt_tokens;
    output.output_tokens = request.output_tokens;
    const auto start = Clock::now();
    tcp::socket socket(io_);
    open_.insert(&socket);
    try {
      co_await exchange(socket, request, output, start);
    } catch (const std::exception& error) {
      if (!result_.interrupted) output.error = error.what();
    }
    open_.erase(&socket);
  }

  asio::awaitable<void> exchange(tcp::socket& socket, const ServingRequest& request,
                                 ServingOutput& output, Clock::time_point start) {
    const std::string body = request_body(options_, request);
    const std::string head = head_of(options_, "POST", path_of(options_.api), body.size());
    co_await asio::async_connect(socket, endpoints_, asio::use_awaitable);
    socket.set_option(tcp::no_delay(true));
    co_await asio::async_write(socket, asio::buffer(head + body), asio::use_awaitable);

    boost::beast::flat_buffer buffer;
    buffer.reserve(kReadBytes);  // as few bytes as 512 are read at once otherwise
    Parser parser;
    parser.body_limit(std::numeric_limits<uint64_t>::max());
    parser.header_limit(kMaxHeaderBytes);
    co_await http::async_read_header(socket, buffer, parser, asio::use_awaitable);
    const bool accepted = parser.get().result() == http::status::ok;
    AnswerReader reader(options_.api, options_.streams, output);
    std::string& unread = parser.get().body();
    while (!parser.is_done()) {
      co_await http::async_read_some(socket, buffer, parser, asio::use_awaitable);
      if (accepted) read_lines(reader, unread, start);
      require(unread.size() <= kMaxLineBytes, "a line has more than {} bytes", kMaxLineBytes);
    }
    require(accepted, "{}", refusal_of(parser.get()));
    reader.line(unread, seconds_since(start));
    reader.finish();
  }

  static void read_lines(AnswerReader& reader, std::string& unread, Clock::time_point start) {
    size_t begin = 0;
    for (size_t end; (end = unread.find('\n', begin)) != unread.npos; begin = end + 1)
      reader.line(std::string_view(unread).substr(begin, end - begin), seconds_since(start));
    unread.erase(0, begin);
  }

  void interrupt() {
    result_.interrupted = true;
    due_.clear();
    error_code ignored;
    next_arrival_.cancel(ignored);
    for (tcp::socket* socket : open_) socket->close(ignored);
  }

  void show_progress() {
    fmt::print(stderr, "\r{} of {} requests ended", n_ended_, requests_.size());
    progress_.expires_after(std::chrono::milliseconds(500));
    progress_.async_wait([this](error_code error) {
      if (!error) show_progress();
    });
  }

  const ServingLoadOptions& options_;
  std::span<const ServingRequest> requests_;
  NumpyRandom& numpy_;
  asio::io_context io_{1};
  const tcp::resolver::results_type endpoints_;
  asio::steady_timer next_arrival_, progress_;
  asio::signal_set signals_;
  std::deque<size_t> due_;
  std::set<tcp::socket*> open_;
  size_t n_running_ = 0, n_ended_ = 0;
  bool all_arrived_ = false;
  ServingLoadResult result_;
};

}  // namespace

ServerAddress parse_address(const std::string& base_url) {
  const std::string scheme = "http://";
  require(base_url.starts_with(scheme),
          "--base-url {}: must begin with http:// (TLS is not supported here: measure behind the "
          "proxy)",
          base_url);
  std::string rest = base_url.substr(scheme.size());
  const size_t slash = rest.find('/');
  ServerAddress address;
  if (slash != rest.npos) address.prefix = rest.substr(slash);
  while (address.prefix.ends_with('/')) address.prefix.pop_back();
  rest.resize(std::min(slash, rest.size()));
  const size_t colon = rest.rfind(':');
  address.host = rest.substr(0, colon);
  address.port = colon == rest.npos ? "80" : rest.substr(colon + 1);
  const bool is_number = !address.port.empty() && address.port.size() <= 5 &&
                         address.port.find_first_not_of("0123456789") == std::string::npos;
  require(!address.host.empty() && is_number, "--base-url {}: must be http://HOST:PORT", base_url);
  return address;
}

std::string request_body(const ServingLoadOptions& o, const ServingRequest& r) {
  nlohmann::ordered_json body;
  if (o.api == ServingApi::kGenerate) {
    if (r.ids.empty())
      body["text"] = r.prompt;
    else
      body["input_ids"] = r.ids;
    body["sampling_params"] = {
        {"temperature", 0.0}, {"max_new_tokens", r.output_tokens}, {"ignore_eos", o.ignore_eos}};
    body["stream"] = o.streams;
    body["lora_path"] = nullptr;
    body["return_logprob"] = o.logprobs;
    body["return_routed_experts"] = false;
    body["logprob_start_len"] = -1;
  } else {
    body["model"] = o.model;
    if (o.api == ServingApi::kChat) {
      body["messages"] = nlohmann::ordered_json::array({{{"role", "user"}, {"content", r.prompt}}});
      body["max_completion_tokens"] = r.output_tokens;
    } else {
      body["prompt"] = r.prompt;
      body["best_of"] = 1;
      body["max_tokens"] = r.output_tokens;
    }
    body["stream"] = o.streams;
    body["temperature"] = 0.0;
    body["ignore_eos"] = o.ignore_eos;
  }
  for (const auto& [name, value] : o.extra_body.items()) body[name] = value;
  return body.dump();
}

ServingLoadResult run_load(const ServingLoadOptions& options,
                           std::span<const ServingRequest> requests, NumpyRandom& numpy) {
  raise_file_limit();
  return Load(options, requests, numpy).run();
}

ServerReply ask_server(const ServingLoadOptions& options, const char* method,
                       const std::string& path) {
  asio::io_context io;
  tcp::socket socket(io);
  error_code error;
  asio::connect(socket, resolve(io, options.server), error);
  if (!error) asio::write(socket, asio::buffer(head_of(options, method, path, 0)), error);
  boost::beast::flat_buffer buffer;
  Parser parser;
  if (!error) http::read(socket, buffer, parser, error);
  if (error)
    throw std::runtime_error(
        fmt::format("no answer from {}{}: {}: start the server, or correct --host, --port or "
                    "--base-url",
                    options.server.url(), path, error.message()));
  const auto& reply = parser.get();
  return {static_cast<int>(reply.result_int()), std::string(reply.reason()), reply.body()};
}

}  // namespace tandem
