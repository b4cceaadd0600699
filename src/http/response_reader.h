// Parses one HTTP response from bytes as they arrive, independent of the transport. The server that
// sends them is not trusted: every length is bounded.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "http/request_handler.h"

namespace tandem {

class ResponseReader {
 public:
  static constexpr uint32_t kMaxHeaderBytes = 32 << 10;
  // Informational responses (1xx) before the response; more are refused.
  static constexpr int kMaxInformational = 8;

  // `answers_head`: the request was HEAD, whose response has no body.
  explicit ResponseReader(bool answers_head);
  ~ResponseReader();

  // `bytes` continue after those consumed so far. Returns the number of bytes consumed; the caller
  // passes the rest again, followed by further bytes. Throws Error when this is not a response.
  size_t consume(std::string_view bytes);
  // The server has closed its side. Throws Error unless that ends the body.
  void end_of_input();

  bool has_head() const { return has_head_; }
  bool is_complete() const;
  // The members below are valid once there is a head.
  int status() const { return status_; }
  const std::vector<HttpField>& fields() const { return fields_; }
  // Value of the first field of that name, in any case; empty: none.
  std::string_view field(std::string_view name) const;
  std::optional<uint64_t> length() const { return length_; }  // of the body, from Content-Length
  bool keeps_alive() const;  // the connection may be used for another request
  // The body may be empty: a response to HEAD, 204 or 304.
  bool has_body() const { return has_body_; }
  // Bytes of the body that have arrived since the last call.
  std::string take_body();
  bool has_body_bytes() const;

 private:
  struct Parser;
  void begin_message();
  void on_head();

  const bool answers_head_;
  std::unique_ptr<Parser> parser_;
  bool has_head_ = false, has_body_ = true;
  int status_ = 0, n_informational_ = 0;
  std::optional<uint64_t> length_;
  std::vector<HttpField> fields_;
};

// Whether two names of header fields are the same.
bool same_field_name(std::string_view a, std::string_view b);

}  // namespace tandem
