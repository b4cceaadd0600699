// Requests and answers of HTTP/1.1 according to RFC 9112, parsed without the server's code: the
// requests in a stream of bytes, and the answers to them.
#pragma once
#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tandem::fuzz {

struct Field {
  std::string name, value;  // the name in lower case
};

struct Message {
  std::string first_line;
  std::vector<Field> fields;
  std::string body;

  std::vector<std::string> all(std::string_view name) const {
    std::vector<std::string> values;
    for (const Field& field : fields)
      if (field.name == name) values.push_back(field.value);
    return values;
  }
};

inline std::string small(std::string_view text) {
  std::string out(text);
  for (char& c : out)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return out;
}

inline std::string trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t");
  if (first == text.npos) return "";
  return std::string(text.substr(first, text.find_last_not_of(" \t") + 1 - first));
}

// Returns whether a list of options contains `option`, which is in lower case.
inline bool has_option(const std::vector<std::string>& values, std::string_view option) {
  for (const std::string& value : values)
    for (size_t first = 0; first <= value.size();) {
      const size_t end = std::min(value.find(',', first), value.size());
      if (small(trimmed(std::string_view(value).substr(first, end - first))) == option) return true;
      first = end + 1;
    }
  return false;
}

enum class Found { kWhole, kPart, kNothing };  // kNothing: not HTTP, or ambiguous

// Takes messages from the front of a byte sequence.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}

  std::string_view rest() const { return rest_; }

  // Reads up to the empty line. Folded lines are joined.
  Found head(Message& out) {
    const size_t end = rest_.find("\r\n\r\n");
    if (end == rest_.npos) return Found::kPart;
    std::string_view lines = rest_.substr(0, end + 2);
    rest_.remove_prefix(end + 4);
    out = {};
    out.first_line = line_of(lines);
    return fields(lines, out.fields) && is_plain(out.first_line) ? Found::kWhole : Found::kNothing;
  }

  Found body_of(uint64_t n_bytes, std::string& out) {
    if (rest_.size() < n_bytes) return Found::kPart;
    out = rest_.substr(0, n_bytes);
    rest_.remove_prefix(n_bytes);
    return Found::kWhole;
  }

  Found chunks(std::string& out) {
    while (true) {
      const size_t end = rest_.find("\r\n");
      if (end == rest_.npos) return Found::kPart;
      const std::string_view line = rest_.substr(0, end);
      const std::optional<uint64_t> size = chunk_size(line);
      if (!size || !is_plain(line)) return Found::kNothing;
      if (*size == 0) break;
      std::string piece;
      rest_.remove_prefix(end + 2);
      if (body_of(*size, piece) == Found::kPart) return Found::kPart;
      out += piece;
      if (rest_.size() < 2) return Found::kPart;
      if (!rest_.starts_with("\r\n")) return Found::kNothing;
      rest_.remove_prefix(2);
    }
    const size_t end = rest_.find("\r\n\r\n");
    if (end == rest_.npos) return Found::kPart;
    std::string_view lines = rest_.substr(0, end + 2);
    rest_.remove_prefix(end + 4);
    line_of(lines);
    std::vector<Field> trailers;
    if (!fields(lines, trailers)) return Found::kNothing;
    const bool has_length = std::any_of(trailers.begin(), trailers.end(), [](const Field& f) {
      return f.name == "content-length" || f.name == "transfer-encoding";
    });
    return has_length ? Found::kNothing : Found::kWhole;
  }

 private:
  static std::string_view line_of(std::string_view& lines) {
    const size_t end = lines.find("\r\n");
    const std::string_view line = lines.substr(0, end);
    lines.remove_prefix(end + 2);
    return line;
  }

  static bool is_plain(std::string_view text) {
    return std::all_of(text.begin(), text.end(), [](char c) {
      return c == '\t' || (static_cast<unsigned char>(c) >= 0x20 && c != 0x7f);
    });
  }

  static bool fields(std::string_view lines, std::vector<Field>& out) {
    while (!lines.empty()) {
      const std::string_view line = line_of(lines);
      if (!is_plain(line)) return false;
      if (line.starts_with(' ') || line.starts_with('\t')) {
        if (out.empty()) return false;
        out.back().value = trimmed(out.back().value + " " + trimmed(line));
        continue;
      }
      const size_t colon = line.find(':');
      if (colon == line.npos || colon == 0 || line.find_first_of(" \t") < colon) return false;
      out.push_back({small(line.substr(0, colon)), trimmed(line.substr(colon + 1))});
    }
    return true;
  }

  static std::optional<uint64_t> chunk_size(std::string_view line) {
    const size_t n_digits = std::min(line.find_first_not_of("0123456789abcdefABCDEF"), line.size());
    uint64_t size = 0;
    for (const char c : line.substr(0, n_digits)) {
      if (size >> 60 != 0) return {};
      size = size * 16 + static_cast<uint64_t>(c <= '9' ? c - '0' : (c | 32) - 'a' + 10);
    }
    const std::string more = trimmed(line.substr(n_digits));
    if (n_digits == 0 || (!more.empty() && more[0] != ';')) return {};
    return size;
  }

  std::string_view rest_;
};

struct Request {
  std::string method;
  bool keeps_open = true;
};

// The requests that a strict parser finds in these bytes.
struct Asked {
  std::vector<Request> requests;
  // An ambiguous head follows the requests, which the server may only refuse.
  bool must_be_refused = false;
  std::string refused_method = {};
};

// The length of the body or "chunked"; nothing if the length or the host is ambiguous.
inline std::optional<std::string> one_length(const Message& m, bool is_http_10) {
  const auto hosts = m.all("host"), codings = m.all("transfer-encoding"),
             lengths = m.all("content-length");
  if (hosts.size() > 1 || (hosts.empty() && !is_http_10)) return {};
  if (codings.size() + lengths.size() > 1) return {};
  if (!codings.empty()) {
    if (is_http_10 || small(codings[0]) != "chunked") return {};
    return "chunked";
  }
  if (lengths.empty()) return "0";
  const std::string& length = lengths[0];
  if (length.empty() || length.size() > 18 || length.find_first_not_of("0123456789") != length.npos)
    return {};
  return length;
}

inline Asked requests_in(std::string_view bytes) {
  Asked asked;
  Reader reader(bytes);
  Message m;
  while (reader.head(m) == Found::kWhole) {
    const size_t first = m.first_line.find(' '), last = m.first_line.rfind(' ');
    if (first == 0 || first == m.first_line.npos || first + 1 >= last) break;
    const std::string version = m.first_line.substr(last + 1);
    if (version != "HTTP/1.1" && version != "HTTP/1.0") break;
    if (m.first_line.find(' ', first + 1) != last || m.first_line.find('\t') != m.first_line.npos)
      break;
    const bool is_http_10 = version == "HTTP/1.0";
    const auto length = one_length(m, is_http_10);
    if (!length) {
      asked.must_be_refused = true;
      asked.refused_method = m.first_line.substr(0, first);
      break;
    }
    const Found body =
        *length == "chunked" ? reader.chunks(m.body) : reader.body_of(std::stoull(*length), m.body);
    if (body != Found::kWhole) break;
    const auto connection = m.all("connection");
    const bool keeps =
        !has_option(connection, "close") && (!is_http_10 || has_option(connection, "keep-alive"));
    asked.requests.push_back({m.first_line.substr(0, first), keeps});
    if (!keeps) break;
  }
  return asked;
}

struct Answer {
  int status = 0;
  Message message;
  bool closes() const { return has_option(message.all("connection"), "close"); }
  bool is(std::string_view content_type) const {
    const auto types = message.all("content-type");
    return !types.empty() && types[0].starts_with(content_type);
  }
};

struct Answers {
  std::vector<Answer> whole;  // without 100 Continue
  bool broken = false;        // the rest is not an answer
  bool part_left = false;     // the rest may be the beginning of an answer
};

inline Answers answers_in(std::string_view bytes, const Asked& asked, bool at_end) {
  const std::vector<Request>& requests = asked.requests;
  Answers answers;
  Reader reader(bytes);
  while (!reader.rest().empty()) {
    Answer answer;
    Message& m = answer.message;
    Found found = reader.head(m);
    const bool has_status = m.first_line.size() > 13 && m.first_line.starts_with("HTTP/1.1 ") &&
                            m.first_line[12] == ' ';
    if (found == Found::kWhole && !has_status) found = Found::kNothing;
    if (found == Found::kWhole) {
      answer.status = std::stoi(m.first_line.substr(9, 3));
      if (answer.status == 100) continue;
      const size_t i = answers.whole.size();
      const auto lengths = m.all("content-length"), codings = m.all("transfer-encoding");
      if (lengths.size() + codings.size() > 1) {
        found = Found::kNothing;
      } else if (i < requests.size() && requests[i].method == "HEAD") {
        found = Found::kWhole;
      } else if (i >= requests.size() && asked.refused_method == "HEAD" && reader.rest().empty()) {
        found = Found::kWhole;  // refused by its fields; a head that cannot be read has no method
      } else if (!lengths.empty()) {
        found = reader.body_of(std::stoull(lengths[0]), m.body);
      } else if (!codings.empty()) {
        found = reader.chunks(m.body);
      } else {  // the body ends with the connection
        found = at_end ? reader.body_of(reader.rest().size(), m.body) : Found::kPart;
      }
    }
    answers.broken = found == Found::kNothing;
    answers.part_left = found == Found::kPart;
    if (found != Found::kWhole) break;
    answers.whole.push_back(std::move(answer));
  }
  return answers;
}

}  // namespace tandem::fuzz
