// Parses one HTTP request from bytes as they arrive, independent of the transport. Boost.Beast does
// the parsing; requests whose length two parsers could read differently are refused (request
// smuggling).
#pragma once
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>

#include "http/request_handler.h"

namespace tandem {

struct ReceivedRequest {
  HttpRequest request;
  bool keep_alive = true;  // the client wants a persistent connection
  bool is_http_10 = false;
};

class RequestReader {
 public:
  static constexpr uint32_t kMaxHeaderBytes = 16 << 10;

  explicit RequestReader(int64_t max_body_bytes);

  // `bytes` continue after those consumed so far. Returns the number of bytes consumed; the caller
  // passes the rest again, followed by further bytes. Throws ApiError for a refused request; the
  // connection cannot be read further then.
  size_t consume(std::string_view bytes);

  bool has_header() const { return has_header_; }
  // Empty until the header has been read; a request that is refused then has one.
  const std::string& method() const { return received_.request.method; }
  bool is_complete() const { return has_header_ && parser_.is_done(); }
  // The client expects "100 Continue" before it sends the body.
  bool expects_continue() const { return expects_continue_; }
  int64_t body_bytes() const { return static_cast<int64_t>(parser_.get().body().size()); }
  // Returns the request, which must be complete; may be called once.
  ReceivedRequest release();

 private:
  void on_header();

  const int64_t max_body_bytes_;
  boost::beast::http::request_parser<boost::beast::http::string_body> parser_;
  ReceivedRequest received_;
  bool has_header_ = false, expects_continue_ = false;
};

}  // namespace tandem
