#include "server/request_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/beast/http/error.hpp>
#include <boost/beast/http/rfc7230.hpp>
#include <string_view>

#include "io/json.h"

namespace tandem {
namespace {

namespace http = boost::beast::http;
using boost::system::error_code;
using Head = http::request_header<>;

std::string text_of(boost::beast::string_view view) { return {view.data(), view.size()}; }

int n_fields(const Head& head, http::field name) { return static_cast<int>(head.count(name)); }

// Whether the text has only characters of a host with an optional port (RFC 3986, section 3.2).
bool is_host(const std::string& text) {
  constexpr std::string_view kOthers = "-._~!$&'()*+,;=%:[]";
  return std::all_of(text.begin(), text.end(), [&](unsigned char c) {
    return (c < 0x80 && std::isalnum(c) != 0) || kOthers.find(static_cast<char>(c)) != kOthers.npos;
  });
}

// Requires one valid field Host (RFC 9112, section 3.2).
void require_host(const Head& head) {
  const int n = n_fields(head, http::field::host);
  const std::string host = text_of(head[http::field::host]);
  if (n > 1 || (n == 0 && head.version() > 10))
    throw ApiError(400, fmt::format("the head has {} fields Host and needs one", n));
  if (!is_host(host))
    throw ApiError(400, fmt::format("the field Host is {}: no name or address", shown(host)));
}

// Requires an unambiguous body length (RFC 9112, sections 6.1 to 6.3). Beast reads no body after a
// transfer coding that it does not know.
void require_one_length(const Head& head) {
  const int n_codings = n_fields(head, http::field::transfer_encoding),
            n_lengths = n_fields(head, http::field::content_length);
  const auto coding = head[http::field::transfer_encoding];
  if (n_codings > 1 || (n_codings == 1 && !boost::beast::iequals(coding, "chunked")))
    throw ApiError(400, fmt::format("the field Transfer-Encoding is {}: chunked alone is possible",
                                    shown(text_of(coding))));
  if (n_codings == 1 && head.version() < 11)
    throw ApiError(400, "HTTP/1.0 has no field Transfer-Encoding");
  if (n_codings + n_lengths > 1)
    throw ApiError(400, "the head has several of the fields Content-Length and Transfer-Encoding");
  const auto length = head[http::field::content_length];
  if (!std::all_of(length.begin(), length.end(), [](char c) { return c >= '0' && c <= '9'; }))
    throw ApiError(
        400, fmt::format("the field Content-Length is {}: no number", shown(text_of(length))));
}

// Whether the connection is persistent (RFC 9112, section 9.3). Beast reads only the first of
// several fields Connection.
bool keeps_open(const Head& head) {
  bool closes = false, keeps = head.version() > 10;
  const auto [begin, end] = head.equal_range(http::field::connection);
  for (auto field = begin; field != end; ++field) {
    http::token_list options{field->value()};
    closes = closes || options.exists("close");
    keeps = keeps || options.exists("keep-alive");
  }
  return keeps && !closes;
}

[[noreturn]] void refuse(const error_code& error, int64_t most_body_bytes) {
  if (error == http::error::body_limit)
    throw ApiError(413, fmt::format("the body is longer than {} bytes", most_body_bytes));
  if (error == http::error::header_limit)
    throw ApiError(431,
                   fmt::format("the head is longer than {} bytes", RequestReader::kMaxHeaderBytes));
  throw ApiError(400, "this is not HTTP: " + error.message());
}

}  // namespace

RequestReader::RequestReader(int64_t most_body_bytes) : most_body_bytes_(most_body_bytes) {
  parser_.header_limit(kMaxHeaderBytes);
  parser_.body_limit(static_cast<uint64_t>(most_body_bytes));
}

size_t RequestReader::take(std::string_view bytes) {
  if (bytes.empty()) return 0;
  error_code error;
  const size_t n = parser_.put({bytes.data(), bytes.size()}, error);
  if (error && error != http::error::need_more) refuse(error, most_body_bytes_);
  if (!has_head_ && parser_.is_header_done()) take_head();
  return n;
}

// Called before the body is parsed, since Beast adds trailer fields after it to the same object.
void RequestReader::take_head() {
  const auto& head = parser_.get();
  require_host(head);
  require_one_length(head);
  const std::string target = text_of(head.target());
  HttpRequest& request = received_.request;
  request.method = text_of(head.method_string());
  request.path = target.substr(0, target.find('?'));
  request.authorization = text_of(head[http::field::authorization]);
  request.page.origin = text_of(head[http::field::origin]);
  request.page.asked_method = text_of(head[http::field::access_control_request_method]);
  received_.keeps_open = keeps_open(head);
  received_.is_http_10 = head.version() < 11;
  waits_for_continue_ =
      !received_.is_http_10 && boost::beast::iequals(head[http::field::expect], "100-continue");
  parser_.eager(true);
  has_head_ = true;
}

ReceivedRequest RequestReader::release() {
  received_.request.body = std::move(parser_.get().body());
  return std::move(received_);
}

}  // namespace tandem
