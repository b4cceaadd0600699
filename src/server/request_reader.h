// The bytes of one HTTP request as they come, apart from where they come from. Boost.Beast parses;
// what two readers of the same bytes could take for requests of different lengths is refused.
#pragma once
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>

#include "server/service.h"

namespace tandem {

struct ReceivedRequest {
  HttpRequest request;
  bool keeps_open = true;  // the client wants to ask again
  bool is_http_10 = false;
};

class RequestReader {
 public:
  static constexpr uint32_t kMostHeadBytes = 16 << 10;

  explicit RequestReader(int64_t most_body_bytes);

  // `bytes` begin where those end that were taken before. Returns how many are taken; the others
  // are to come again with more behind them. Throws ApiError for a request that is refused: nothing
  // behind it can be read.
  size_t take(std::string_view bytes);

  bool has_head() const { return has_head_; }
  bool is_complete() const { return has_head_ && parser_.is_done(); }
  // The client waits for "100 Continue" before it sends the body.
  bool waits_for_continue() const { return waits_for_continue_; }
  int64_t body_bytes() const { return static_cast<int64_t>(parser_.get().body().size()); }
  // The request, which is complete; to be called once.
  ReceivedRequest release();

 private:
  void take_head();

  const int64_t most_body_bytes_;
  boost::beast::http::request_parser<boost::beast::http::string_body> parser_;
  ReceivedRequest received_;
  bool has_head_ = false, waits_for_continue_ = false;
};

}  // namespace tandem
