// HTTP requests of a client, by libcurl: redirects, proxies, TLS and connections that are used
// again.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

namespace tandem {

struct HttpReply {
  int status = 0;            // of the last redirect's target; 0: there was no answer
  std::string problem;       // why the transfer ended early; empty: it did not
  std::string refusal;       // the beginning of the body of an answer that is not 2xx
  int64_t range_begin = 0;   // of Content-Range; 0 without it
  int64_t total_bytes = -1;  // of the whole file, by Content-Range or Content-Length; -1: unknown
  double retry_seconds = 0;  // of Retry-After; 0 without it

  bool ok() const { return status >= 200 && status < 300; }
};

struct HttpOptions {
  std::string token;         // sent to the first host only, not to those of redirects; may be empty
  double idle_seconds = 30;  // a transfer that receives nothing for so long is ended
};

// One connection, for one thread at a time.
class HttpConnection {
 public:
  // Receives the body of a 2xx answer piece by piece, with the status and headers that preceded it.
  // False ends the transfer without a problem.
  using Sink = std::function<bool(const HttpReply& reply, std::span<const std::byte> bytes)>;

  // Throws Error if libcurl is not installed.
  explicit HttpConnection(HttpOptions options);
  HttpConnection(HttpConnection&&) noexcept;
  ~HttpConnection();

  // GET of the bytes from `begin` up to but without `end`, or of everything if end is 0. Network
  // failures are in the reply; exceptions of `sink` pass through.
  HttpReply get(const std::string& url, const Sink& sink, int64_t begin = 0, int64_t end = 0);

 private:
  struct Curl;
  struct State;
  std::unique_ptr<State> state_;
};

// How often a request is tried again.
class Retries {
 public:
  // n_tries: failures in a row before giving up.
  explicit Retries(int n_tries) : n_tries_(n_tries) {}

  // After a reply that is not ok or not whole: waits, longer after each failure, or as long as the
  // server asks. Throws Error if the server refuses, RunError if it was tried often enough. `go_on`
  // is asked ten times a second; if it says no, wait() returns.
  void wait(const std::string& url, const HttpReply& reply, const std::function<bool()>& go_on);
  void succeeded() { n_failures_ = 0; }

 private:
  const int n_tries_;
  int n_failures_ = 0;
};

// The text with everything but letters, digits and -._~ percent-encoded; slashes stay if
// keep_slashes.
std::string url_encoded(const std::string& text, bool keep_slashes);

}  // namespace tandem
