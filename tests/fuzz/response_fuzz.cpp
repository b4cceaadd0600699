// Arbitrary bytes as the answer of a server that is not trusted give an Error or a response, the
// same one in whatever pieces they arrive. Input: a byte with flags, a byte for the lengths of the
// pieces, the bytes of the answer.
// clang-format off
#include "http/response_reader.h"  // works around a defect of Boost 1.74 (http/awaitable.h)
// clang-format on

#include "core/check.h"

namespace {

using namespace tandem;

struct Read {
  bool refused = false, complete = false;
  int status = 0;
  std::string body;
};

Read read(std::string_view bytes, bool answers_head, size_t piece) {
  Read result;
  ResponseReader reader(answers_head);
  try {
    std::string waiting;
    size_t used = 1;
    while (!reader.is_complete() && (used > 0 || !bytes.empty())) {
      if (used == 0) {
        waiting += bytes.substr(0, piece);
        bytes.remove_prefix(std::min(piece, bytes.size()));
      }
      used = reader.consume(waiting);
      check(used <= waiting.size(), "no more is consumed than there is");
      waiting.erase(0, used);
      if (reader.has_head()) result.body += reader.take_body();
    }
    if (!reader.is_complete()) reader.end_of_input();
    result.complete = reader.is_complete();
  } catch (const Error& error) {
    check(std::string_view(error.what()).find('\n') == std::string_view::npos, "one line");
    result.refused = true;
  }
  if (reader.has_head()) {
    result.status = reader.status();
    check(result.status >= 200 && result.status <= 599, "status");
    check(reader.has_body() || result.body.empty(), "no body where there may be none");
    check(!reader.length() || result.body.size() <= *reader.length(), "the length is the body's");
    for (const HttpField& field : reader.fields())
      check((field.name + field.value).find_first_of("\r\n") == std::string::npos, "one line");
  }
  return result;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 2, size - 2);
  const bool answers_head = data[0] % 2 == 1;
  const Read whole = read(bytes, answers_head, std::max<size_t>(bytes.size(), 1));
  const Read pieces = read(bytes, answers_head, 1 + data[1] % 16);
  check(whole.complete != whole.refused, "read or refused");
  check(whole.refused == pieces.refused, "alike in pieces");
  check(whole.refused || (whole.status == pieces.status && whole.body == pieces.body), "the same");
  return 0;
}
