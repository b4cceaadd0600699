#include "router/forwarding.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/beast/http/rfc7230.hpp>
#include <charconv>

#include "core/check.h"
#include "io/json.h"
#include "server/answer_json.h"

namespace tandem {
namespace {

// An answer with a Content-Length is sent when it is whole or has so many bytes: until then another
// backend can give it.
constexpr size_t kHeldBytes = 256 << 10;
constexpr size_t kMaxRefusalBytes = 64 << 10;
constexpr size_t kMaxIdle = 256;  // connections of a backend

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return out;
}

double since(RouterClock::time_point start, RouterClock::time_point end) {
  return std::chrono::duration<double>(end - start).count();
}

// Tokens of a whole answer, from its usage; 0: not named.
int64_t completion_tokens(std::string_view body) {
  constexpr std::string_view kName = "\"completion_tokens\":";
  const size_t at = body.rfind(kName);
  int64_t n = 0;
  if (at == body.npos) return 0;
  const size_t digits = std::min(body.find_first_not_of(' ', at + kName.size()), body.size());
  std::from_chars(body.data() + digits, body.data() + body.size(), n);
  return n;
}

}  // namespace

std::string forwarded_fields(const std::vector<HttpField>& fields,
                             const std::vector<std::string>& without) {
  std::vector<std::string> dropped = {"connection",
                                      "keep-alive",
                                      "proxy-authenticate",
                                      "proxy-authorization",
                                      "proxy-connection",
                                      "te",
                                      "trailer",
                                      "transfer-encoding",
                                      "upgrade",
                                      "content-length",
                                      "host",
                                      "expect"};
  dropped.insert(dropped.end(), without.begin(), without.end());
  for (const HttpField& field : fields) {
    if (!same_field_name(field.name, "connection")) continue;
    for (const auto name : boost::beast::http::token_list(field.value))
      dropped.push_back(lower({name.data(), name.size()}));
  }
  std::string lines;
  for (const HttpField& field : fields)
    if (std::find(dropped.begin(), dropped.end(), lower(field.name)) == dropped.end())
      lines += fmt::format("{}: {}\r\n", field.name, field.value);
  return lines;
}

// An attempt to get the answer from a backend.
struct Forwarding::Attempt {
  const Pointer backend;
  const int64_t known_bytes;
  const bool was_idle;  // the backend had no other request
  std::shared_ptr<HttpClient> connection = {};
  bool reused = false;  // the connection has answered another request
  std::unique_ptr<ResponseReader> reader = {};
  std::string held = {};  // bytes of the body that the client has not got
  bool has_sent = false;
  std::string last_bytes = {};  // at most two, that the client has got
  RouterClock::time_point started = RouterClock::now(), first = {}, last = {};
  int64_t n_events = 0;
  std::string error = {};

  bool is_stream() const {
    return reader && reader->has_head() && !reader->length() &&
           lower(reader->field("content-type")).starts_with("text/event-stream");
  }
  // Counts the events of a stream, which end with empty lines.
  void count(std::string_view piece) {
    if (piece.empty()) return;
    last = RouterClock::now();
    if (n_events == 0 && first == RouterClock::time_point{}) first = last;
    const std::string joined = last_bytes.substr(last_bytes.size() > 1 ? 1 : 0);
    if (joined == "\n" && piece.front() == '\n') ++n_events;
    for (size_t at = 0; (at = piece.find("\n\n", at)) != piece.npos; at += 2) ++n_events;
    last_bytes += piece.substr(piece.size() - std::min<size_t>(piece.size(), 2));
    last_bytes.erase(0, last_bytes.size() - std::min<size_t>(last_bytes.size(), 2));
  }
};

// Keeps a connection where it can be closed: when the client leaves, and when checks fail.
class Forwarding::Running {
 public:
  Running(Forwarding& forwarding, const Attempt& attempt)
      : forwarding_(forwarding), backend_(attempt.backend), connection_(attempt.connection) {
    forwarding_.connection_ = connection_.get();
    backend_->running.insert(connection_.get());
  }
  ~Running() {
    forwarding_.connection_ = nullptr;
    backend_->running.erase(connection_.get());
  }
  Running(const Running&) = delete;

 private:
  Forwarding& forwarding_;
  const Pointer backend_;
  const std::shared_ptr<HttpClient> connection_;
};

boost::asio::awaitable<bool> Forwarding::write_to(AnswerWriter& client) {
  std::optional<ApiError> refused;
  try {
    require_possible();
  } catch (const ApiError& error) {
    refused = error;
  }
  if (refused) {
    HttpResponse response;
    response.status = refused->status;
    response.body = dump_json(error_json(*refused));
    co_await client.respond(std::move(response));
    co_return true;
  }
  while (true) {
    const BackendPool::Choice choice = choose();
    if (!choice.backend) {
      HttpResponse response = unavailable();
      co_await client.respond(std::move(response));
      co_return true;
    }
    tries_.push_back({choice.backend, choice.backend->health.n_ups()});
    Attempt attempt{.backend = choice.backend,
                    .known_bytes = choice.known_bytes,
                    .was_idle = choice.backend->n_running == 0};
    const AttemptEnd end = co_await try_backend(attempt, client);
    const bool others_left =
        request_.backend.empty() && context_.pool.has_choice(request_.summary, tried());
    switch (next_step({.end = end,
                       .has_sent = attempt.has_sent,
                       .is_stream = attempt.is_stream(),
                       .others_left = others_left,
                       .has_refusal = refusal_.has_value(),
                       .n_attempts = static_cast<int>(tries_.size())})) {
      case NextStep::kDone:
        co_return end == AttemptEnd::kAnswered;
      case NextStep::kTryAnother:
        ++choice.backend->n_retries;
        break;
      case NextStep::kPassRefusalOn:
        co_return co_await pass_refusal_on(client);
      case NextStep::kUnavailable: {
        HttpResponse response = unavailable();
        co_await client.respond(std::move(response));
        co_return true;
      }
      case NextStep::kErrorEvent:
        co_return co_await end_stream(attempt, client);
      case NextStep::kBreakOff:
        co_return false;
    }
  }
}

void Forwarding::cancel() {
  cancelled_ = true;
  if (connection_) connection_->close();
}

// Throws ApiError for a request that no backend here can get.
void Forwarding::require_possible() const {
  const BackendPool& pool = context_.pool;
  const std::string& model = request_.summary.model;
  if (!model.empty() && !pool.may_have_model(model))
    throw ApiError(404, fmt::format("no backend serves the model {}: see /v1/models", shown(model)),
                   "model", "model_not_found");
  if (!request_.backend.empty() && !pool.find(request_.backend))
    throw ApiError(404, fmt::format("{} is not a backend here", request_.backend), "backend",
                   "backend_not_found");
  if (request_.needs_backend && request_.backend.empty() && pool.all().size() > 1)
    throw ApiError(400,
                   "this path concerns one backend: name it with ?backend=http://HOST:PORT, one of "
                   "those of /backends",
                   "backend");
}

// A backend that has come up again since it was tried is another process, and may be tried again.
std::vector<Forwarding::Pointer> Forwarding::tried() const {
  std::vector<Pointer> backends;
  for (const Try& t : tries_)
    if (t.backend->health.n_ups() == t.n_ups) backends.push_back(t.backend);
  return backends;
}

BackendPool::Choice Forwarding::choose() const {
  if (request_.backend.empty())
    return context_.pool.choose(request_.summary, tried(), RouterClock::now());
  const Pointer named = context_.pool.find(request_.backend);
  return {.backend = tries_.empty() && named && named->health.is_up() ? named : nullptr};
}

// A connection that was used before may be one that the backend is closing: then a new one is
// tried.
Forwarding::Task<AttemptEnd> Forwarding::try_backend(Attempt& attempt, AnswerWriter& client) {
  Backend& backend = *attempt.backend;
  ++backend.n_requests;
  ++backend.n_running;
  const std::shared_ptr<void> no_longer_running(nullptr,
                                                [b = attempt.backend](void*) { --b->n_running; });
  AttemptEnd end = AttemptEnd::kFailed;
  while (!backend.idle.empty() && !attempt.connection) {
    const auto kept = backend.idle.back();
    backend.idle.pop_back();
    if (kept->can_be_reused()) attempt.connection = kept;
  }
  attempt.reused = attempt.connection != nullptr;
  if (attempt.reused) end = co_await exchange(attempt, client);
  const bool was_stale = attempt.reused && end == AttemptEnd::kFailed && !attempt.has_sent &&
                         !attempt.connection->has_received();
  if (!attempt.reused || was_stale) {
    attempt.reused = false;
    attempt.connection = std::make_shared<HttpClient>(context_.executor, context_.trust);
    end = co_await exchange(attempt, client);
  }
  if (end == AttemptEnd::kFailed) {
    ++backend.n_failures;
    why_ = fmt::format("{}: {}", backend.address.url(), attempt.error);
    context_.on_failure(attempt.backend, attempt.error);
  }
  co_return end;
}

Forwarding::Task<AttemptEnd> Forwarding::exchange(Attempt& attempt, AnswerWriter& client) {
  const Running running(*this, attempt);
  attempt.reader = std::make_unique<ResponseReader>(request_.method == "HEAD");
  attempt.error.clear();
  AttemptEnd end = AttemptEnd::kFailed;
  try {
    attempt.error = co_await send(attempt);
    if (attempt.error.empty()) attempt.error = co_await receive_beginning(attempt);
    if (attempt.error.empty()) {
      const int status = attempt.reader->status();
      if (status == 429 || status == 503) {
        end = co_await hold_refusal(attempt);
      } else {
        end = co_await relay(attempt, client);
      }
    }
  } catch (const std::exception& error) {
    attempt.error = error.what();
    end = AttemptEnd::kFailed;
  }
  if (cancelled_) end = AttemptEnd::kClientGone;
  if (end != AttemptEnd::kFailed && end != AttemptEnd::kClientGone) keep(attempt);
  if (end == AttemptEnd::kFailed || end == AttemptEnd::kClientGone) attempt.connection->close();
  co_return end;
}

// An error while sending is not reported before what the backend has answered is read.
Forwarding::Task<std::string> Forwarding::send(Attempt& attempt) {
  HttpClient& connection = *attempt.connection;
  const HttpAddress& address = attempt.backend->address;
  if (cancelled_) co_return "the client has disconnected";
  if (!attempt.reused) {
    connection.set_deadline(context_.connect_most);
    const std::string error = co_await connection.connect(address);
    if (!error.empty()) co_return error;
  }
  std::string head = fmt::format("{} {} HTTP/1.1\r\nHost: {}\r\n{}", request_.method,
                                 request_.target, address.authority, request_.fields);
  if (!context_.backend_api_key.empty())
    head += fmt::format("Authorization: Bearer {}\r\n", context_.backend_api_key);
  if (!request_.body.empty() || request_.method == "POST" || request_.method == "PUT")
    head += fmt::format("Content-Length: {}\r\n", request_.body.size());
  head += "\r\n";
  connection.set_deadline(context_.send_most);
  co_await connection.send(head, request_.body);
  if (context_.first_byte_most.count() > 0) {
    connection.set_deadline(context_.first_byte_most);
  } else {
    connection.clear_deadline();
  }
  co_return "";
}

// Reads as much as the client has to wait for.
Forwarding::Task<std::string> Forwarding::receive_beginning(Attempt& attempt) {
  ResponseReader& reader = *attempt.reader;
  std::string error;
  while (error.empty() && !reader.is_complete() &&
         (attempt.held.empty() || (reader.length() && attempt.held.size() < kHeldBytes))) {
    error = co_await attempt.connection->receive(reader);
    attempt.held += reader.take_body();
  }
  attempt.connection->clear_deadline();
  co_return error;
}

Forwarding::Task<AttemptEnd> Forwarding::relay(Attempt& attempt, AnswerWriter& client) {
  ResponseReader& reader = *attempt.reader;
  attempt.count(attempt.held);
  client.begin(head_of(attempt));
  attempt.has_sent = true;
  const int64_t n_tokens =
      request_.generates && reader.is_complete() ? completion_tokens(attempt.held) : 0;
  std::string beginning = std::exchange(attempt.held, {});
  bool open = co_await client.write(std::move(beginning));
  while (open && attempt.error.empty() && !reader.is_complete()) {
    attempt.error = co_await attempt.connection->receive(reader);
    std::string piece = reader.take_body();
    attempt.count(piece);
    if (!piece.empty()) open = co_await client.write(std::move(piece));
  }
  if (!open) co_return AttemptEnd::kClientGone;
  if (!attempt.error.empty()) co_return AttemptEnd::kFailed;
  open = co_await client.finish(false);
  if (n_tokens > 0 && !attempt.is_stream() && reader.status() == 200) {
    attempt.backend->speed.add_whole(since(attempt.started, attempt.last), n_tokens, attempt.last);
    context_.pool.add_answer(n_tokens);
  }
  measure(attempt);
  co_return open ? AttemptEnd::kAnswered : AttemptEnd::kClientGone;
}

Forwarding::Task<AttemptEnd> Forwarding::hold_refusal(Attempt& attempt) {
  while (attempt.error.empty() && !attempt.reader->is_complete()) {
    attempt.error = co_await attempt.connection->receive(*attempt.reader);
    attempt.held += attempt.reader->take_body();
    require(attempt.held.size() <= kMaxRefusalBytes, "a refusal of more than {} bytes",
            kMaxRefusalBytes);
  }
  if (!attempt.error.empty()) co_return AttemptEnd::kFailed;
  AnswerWriter::Head head = head_of(attempt);
  if (head.has_body) head.length = attempt.held.size();
  refusal_ = {std::move(head), std::exchange(attempt.held, {})};
  co_return AttemptEnd::kRefused;
}

Forwarding::Task<bool> Forwarding::pass_refusal_on(AnswerWriter& client) {
  client.begin(refusal_->head);
  std::string body = refusal_->body;
  if (!co_await client.write(std::move(body))) co_return false;
  co_return co_await client.finish(false);
}

// The last event of a stream that a backend has begun: an error as `tandem serve` writes it. The
// stream may have stopped inside an event, which an empty line ends.
Forwarding::Task<bool> Forwarding::end_stream(const Attempt& attempt, AnswerWriter& client) {
  std::string event = sse_event(
      error_json(ApiError(502, "the backend failed in the middle of the answer: " + attempt.error,
                          {}, "backend_failed")));
  if (!attempt.last_bytes.empty() && attempt.last_bytes != "\n\n") event.insert(0, "\n\n");
  if (co_await client.write(std::move(event))) co_await client.finish(true);
  co_return false;
}

void Forwarding::measure(const Attempt& attempt) {
  Backend& backend = *attempt.backend;
  const double total = since(attempt.started, RouterClock::now());
  if (attempt.first == RouterClock::time_point{}) return;
  const double first = since(attempt.started, attempt.first);
  backend.first_byte_seconds.add(first);
  backend.total_seconds.add(total);
  if (!request_.generates || !attempt.is_stream() || attempt.reader->status() != 200) return;
  const int64_t n_gaps = attempt.n_events - 1;
  std::optional<double> per_event;
  if (n_gaps > 1) per_event = since(attempt.first, attempt.last) / static_cast<double>(n_gaps);
  backend.speed.add_stream(first, per_event, attempt.last);
  if (attempt.n_events > 0) context_.pool.add_answer(attempt.n_events);
  if (attempt.was_idle && attempt.known_bytes == 0)
    context_.pool.add_prompt(first, request_.summary.prompt_bytes);
}

void Forwarding::keep(const Attempt& attempt) {
  auto& idle = attempt.backend->idle;
  if (!context_.closed && !attempt.backend->removed && attempt.reader->keeps_alive() &&
      idle.size() < kMaxIdle && attempt.connection->can_be_reused()) {
    attempt.connection->clear_deadline();
    idle.push_back(attempt.connection);
  }
}

AnswerWriter::Head Forwarding::head_of(const Attempt& attempt) const {
  const ResponseReader& reader = *attempt.reader;
  std::vector<std::string> without;
  if (context_.replaces_cors)
    without = {"access-control-allow-origin", "access-control-allow-methods",
               "access-control-allow-headers", "access-control-max-age"};
  return {.status = reader.status(),
          .fields = forwarded_fields(reader.fields(), without) + cors_,
          .has_body = reader.has_body(),
          .length = reader.length()};
}

HttpResponse Forwarding::unavailable() const {
  const ApiError error(503,
                       why_.empty()
                           ? "no backend can answer now: try again later"
                           : "no backend could answer: try again later; the last one: " + why_,
                       {}, "no_backend");
  return {.status = 503, .body = dump_json(error_json(error)), .retry_after_seconds = 1};
}

}  // namespace tandem
