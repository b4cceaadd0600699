// The interface between HttpServer, which has the sockets, and what answers its requests.
#pragma once
// clang-format off
#include "http/awaitable.h"
// clang-format on

#include <boost/asio/any_io_executor.hpp>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "http/api_error.h"
#include "http/cors.h"
#include "http/streamed_answer.h"

namespace tandem {

struct HttpField {
  std::string name, value;
};

struct HttpRequest {
  std::string method, path;  // path: without the query
  std::string authorization;
  std::string body;
  CorsHeaders cors = {};
  std::string query = {};              // without the question mark
  std::vector<HttpField> fields = {};  // the header section, in its order
};

struct HttpResponse {
  int status = 200;
  std::string body = {};
  const char* content_type = "application/json";
  int retry_after_seconds = 0;  // header Retry-After; 0: none
  std::string allow = {};       // header Allow of a 405 response; empty: none
};

// Writes one response to a client. Members run on the I/O thread.
class AnswerWriter {
 public:
  template <class T>
  using Task = boost::asio::awaitable<T>;
  struct Head {
    int status = 200;
    std::string fields;  // whole lines, without those about length and connection
    bool has_body = true;
    std::optional<uint64_t> length = {};  // bytes of the body; empty: known when it has ended
  };

  virtual ~AnswerWriter() = default;
  // Writes a whole response. Instead of the other members.
  virtual Task<void> respond(HttpResponse response) = 0;
  // The head is sent together with the first bytes of the body.
  virtual void begin(Head head) = 0;
  // Sends bytes of the body at once. False: the client is gone.
  virtual Task<bool> write(std::string bytes) = 0;
  // Ends the body. `closes`: the connection ends too, as after an error inside a stream.
  virtual Task<bool> finish(bool closes) = 0;
};

// An answer that a coroutine of the I/O thread writes, such as one that comes from another server.
class RelayedAnswer {
 public:
  virtual ~RelayedAnswer() = default;
  // Writes the answer. False: not all of it is written, and the connection has to end.
  virtual boost::asio::awaitable<bool> write_to(AnswerWriter& client) = 0;
  // Called when the client has disconnected; write_to() then ends soon.
  virtual void cancel() = 0;
};

class RequestHandler {
 public:
  using Result =
      std::variant<HttpResponse, std::shared_ptr<StreamedAnswer>, std::shared_ptr<RelayedAnswer>>;

  virtual ~RequestHandler() = default;
  // Handles a request, on one of several worker threads. The caller must start() a StreamedAnswer,
  // or call write_to() of a RelayedAnswer.
  virtual Result handle(const HttpRequest& request) noexcept = 0;

  // Whether handle() takes no longer than another thread takes to begin with it: then the I/O
  // thread calls it.
  virtual bool handles_quickly(const HttpRequest& request) const {
    static_cast<void>(request);
    return false;
  }

  // The members below are called on the I/O thread.
  virtual HttpResponse error_response(const ApiError& error) = 0;
  // CORS header lines of every response to this request.
  virtual std::string cors(const HttpRequest& request) const = 0;
  // Counts a response that is sent.
  virtual void count_response(int status) = 0;
  // New requests are refused from now on.
  virtual void set_stopping() = 0;
  // The server begins to run handlers on `executor`.
  virtual void begin(const boost::asio::any_io_executor& executor) { static_cast<void>(executor); }
  // No handler runs any more. Sockets on the executor must be destroyed now.
  virtual void end() {}
};

}  // namespace tandem
