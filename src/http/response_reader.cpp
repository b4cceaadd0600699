#include "http/response_reader.h"

#include <boost/beast/core/buffers_range.hpp>
#include <boost/beast/http/error.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/rfc7230.hpp>
#include <limits>

#include "core/check.h"
#include "io/json.h"

namespace tandem {
namespace {

namespace http = boost::beast::http;
using boost::system::error_code;

// No answer is longer; larger lengths are mistakes or attacks.
constexpr uint64_t kMaxBodyBytes = uint64_t{1} << 40;

std::string copied(boost::beast::string_view view) { return {view.data(), view.size()}; }

}  // namespace

// A body that appends to a text. Unlike Beast's string_body it does not reserve the memory that the
// Content-Length names.
struct AppendedResponseBody {
  using value_type = std::string;
  class reader {
   public:
    template <bool kIsRequest, class Fields>
    reader(http::header<kIsRequest, Fields>&, value_type& body) : body_(body) {}
    void init(const boost::optional<uint64_t>&, error_code& error) { error = {}; }
    template <class Buffers>
    size_t put(const Buffers& buffers, error_code& error) {
      error = {};
      size_t n = 0;
      for (const auto buffer : boost::beast::buffers_range_ref(buffers)) {
        body_.append(static_cast<const char*>(buffer.data()), buffer.size());
        n += buffer.size();
      }
      return n;
    }
    void finish(error_code& error) { error = {}; }

   private:
    value_type& body_;
  };
};

struct ResponseReader::Parser : http::response_parser<AppendedResponseBody> {};

ResponseReader::ResponseReader(bool answers_head) : answers_head_(answers_head) { begin_message(); }

ResponseReader::~ResponseReader() = default;

void ResponseReader::begin_message() {
  parser_ = std::make_unique<Parser>();
  parser_->header_limit(kMaxHeaderBytes);
  parser_->body_limit(std::numeric_limits<uint64_t>::max());
  parser_->skip(answers_head_);
}

size_t ResponseReader::consume(std::string_view bytes) {
  if (bytes.empty() || is_complete()) return 0;
  error_code error;
  const size_t n = parser_->put({bytes.data(), bytes.size()}, error);
  require(!error || error == http::error::need_more, "the answer is not valid HTTP: {}",
          error.message());
  if (!has_head_ && parser_->is_header_done()) on_head();
  return n;
}

// Called before the body is parsed, since Beast adds trailer fields after it to the same object.
void ResponseReader::on_head() {
  const auto& head = parser_->get();
  status_ = head.result_int();
  require(status_ >= 100 && status_ <= 599, "the answer's status is {}", status_);
  if (status_ < 200) {
    require(status_ != 101, "the answer changes the protocol");
    require(++n_informational_ <= kMaxInformational, "the answer has more than {} parts before it",
            kMaxInformational);
    return begin_message();
  }
  const auto coding = head[http::field::transfer_encoding];
  require(coding.empty() || boost::beast::iequals(coding, "chunked"),
          "the answer's Transfer-Encoding is {}: only chunked is supported", shown(copied(coding)));
  require(head.count(http::field::content_length) + head.count(http::field::transfer_encoding) <= 1,
          "the answer has more than one Content-Length or Transfer-Encoding header");
  if (const auto length = parser_->content_length()) {
    require(*length <= kMaxBodyBytes, "the answer's length is {} bytes", *length);
    length_ = *length;
  }
  has_body_ = !answers_head_ && status_ != 204 && status_ != 304;
  for (const auto& field : head)
    fields_.push_back({copied(field.name_string()), copied(field.value())});
  has_head_ = true;
  parser_->eager(true);
}

void ResponseReader::end_of_input() {
  error_code error;
  if (has_head_) parser_->put_eof(error);
  require(has_head_ && !error && is_complete(), "the answer breaks off");
}

bool ResponseReader::is_complete() const { return has_head_ && parser_->is_done(); }

std::string_view ResponseReader::field(std::string_view name) const {
  for (const HttpField& field : fields_)
    if (same_field_name(field.name, name)) return field.value;
  return {};
}

bool ResponseReader::keeps_alive() const { return is_complete() && parser_->keep_alive(); }

std::string ResponseReader::take_body() { return std::exchange(parser_->get().body(), {}); }

bool ResponseReader::has_body_bytes() const { return !parser_->get().body().empty(); }

bool same_field_name(std::string_view a, std::string_view b) {
  return boost::beast::iequals({a.data(), a.size()}, {b.data(), b.size()});
}

}  // namespace tandem
