#include "http/request_reader.h"

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
using Header = http::request_header<>;

std::string text_of(boost::beast::string_view view) { return {view.data(), view.size()}; }

int n_headers(const Header& header, http::field name) {
  return static_cast<int>(header.count(name));
}

// Whether the text has only characters of a host with an optional port (RFC 3986, section 3.2).
bool is_host(const std::string& text) {
  constexpr std::string_view kOthers = "-._~!$&'()*+,;=%:[]";
  return std::all_of(text.begin(), text.end(), [&](unsigned char c) {
    return (c < 0x80 && std::isalnum(c) != 0) || kOthers.find(static_cast<char>(c)) != kOthers.npos;
  });
}

// Requires one valid Host header (RFC 9112, section 3.2).
void require_host(const Header& header) {
  const int n = n_headers(header, http::field::host);
  const std::string host = text_of(header[http::field::host]);
  if (n > 1 || (n == 0 && header.version() > 10))
    throw ApiError(400, fmt::format("the request has {} Host headers: must be exactly one", n));
  if (!is_host(host))
    throw ApiError(
        400, fmt::format("the Host header is {}: must be a host name or an address", shown(host)));
}

// Requires an unambiguous body length (RFC 9112, sections 6.1 to 6.3). Beast reads no body after a
// transfer coding that it does not know.
void require_one_length(const Header& header) {
  const int n_codings = n_headers(header, http::field::transfer_encoding),
            n_lengths = n_headers(header, http::field::content_length);
  const auto coding = header[http::field::transfer_encoding];
  if (n_codings > 1 || (n_codings == 1 && !boost::beast::iequals(coding, "chunked")))
    throw ApiError(400, fmt::format("the Transfer-Encoding header is {}: only chunked is supported",
                                    shown(text_of(coding))));
  if (n_codings == 1 && header.version() < 11)
    throw ApiError(400, "HTTP/1.0 does not have the Transfer-Encoding header");
  if (n_codings + n_lengths > 1)
    throw ApiError(400, "the request has more than one Content-Length or Transfer-Encoding header");
  const auto length = header[http::field::content_length];
  if (!std::all_of(length.begin(), length.end(), [](char c) { return c >= '0' && c <= '9'; }))
    throw ApiError(400, fmt::format("the Content-Length header is {}: must be a number",
                                    shown(text_of(length))));
}

// Whether the connection is persistent (RFC 9112, section 9.3). Beast reads only the first of
// several Connection headers.
bool keep_alive(const Header& header) {
  bool closes = false, keeps = header.version() > 10;
  const auto [begin, end] = header.equal_range(http::field::connection);
  for (auto field = begin; field != end; ++field) {
    http::token_list options{field->value()};
    closes = closes || options.exists("close");
    keeps = keeps || options.exists("keep-alive");
  }
  return keeps && !closes;
}

[[noreturn]] void refuse(const error_code& error, int64_t max_body_bytes) {
  if (error == http::error::body_limit)
    throw ApiError(413, fmt::format("the body is longer than {} bytes", max_body_bytes));
  if (error == http::error::header_limit)
    throw ApiError(431, fmt::format("the header section is longer than {} bytes",
                                    RequestReader::kMaxHeaderBytes));
  throw ApiError(400, "the request is not valid HTTP: " + error.message());
}

}  // namespace

RequestReader::RequestReader(int64_t max_body_bytes) : max_body_bytes_(max_body_bytes) {
  parser_.header_limit(kMaxHeaderBytes);
  parser_.body_limit(static_cast<uint64_t>(max_body_bytes));
}

size_t RequestReader::consume(std::string_view bytes) {
  if (bytes.empty()) return 0;
  error_code error;
  const size_t n = parser_.put({bytes.data(), bytes.size()}, error);
  if (error && error != http::error::need_more) refuse(error, max_body_bytes_);
  if (!has_header_ && parser_.is_header_done()) on_header();
  return n;
}

// Called before the body is parsed, since Beast adds trailer fields after it to the same object.
void RequestReader::on_header() {
  const auto& header = parser_.get();
  HttpRequest& request = received_.request;
  request.method = text_of(header.method_string());
  require_host(header);
  require_one_length(header);
  const std::string target = text_of(header.target());
  const size_t question = target.find('?');
  request.path = target.substr(0, question);
  if (question != target.npos) request.query = target.substr(question + 1);
  for (const auto& field : header)
    request.fields.push_back({text_of(field.name_string()), text_of(field.value())});
  request.authorization = text_of(header[http::field::authorization]);
  request.cors.origin = text_of(header[http::field::origin]);
  request.cors.requested_method = text_of(header[http::field::access_control_request_method]);
  received_.keep_alive = keep_alive(header);
  received_.is_http_10 = header.version() < 11;
  expects_continue_ =
      !received_.is_http_10 && boost::beast::iequals(header[http::field::expect], "100-continue");
  parser_.eager(true);
  has_header_ = true;
}

ReceivedRequest RequestReader::release() {
  received_.request.body = std::move(parser_.get().body());
  return std::move(received_);
}

}  // namespace tandem
