#include "text/utf8.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace tandem {
namespace {

struct Scan {
  size_t n_bytes;  // length of the character or of the maximal ill-formed part; at least 1
  enum { kComplete, kInvalid, kIncomplete } state;
};

// Scans the character that starts at `at`. kIncomplete: the text ends inside a character that is
// well-formed so far.
Scan scan_character(std::string_view text, size_t at);

// Number of ASCII bytes before the first byte that is not ASCII; 8 if all are.
size_t leading_ascii(const char* eight_bytes) {
  uint64_t word;
  std::memcpy(&word, eight_bytes, sizeof word);
  return static_cast<size_t>(std::countr_zero(word & 0x8080808080808080u)) / 8;
}

}  // namespace

size_t find_invalid_utf8(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    if (at + 8 <= text.size() && leading_ascii(text.data() + at) == 8) {
      at += 8;
      continue;
    }
    const Scan scan = scan_character(text, at);
    if (scan.state != Scan::kComplete) return at;
    at += scan.n_bytes;
  }
  return std::string_view::npos;
}

std::string Utf8Stream::push(std::string_view bytes) {
  std::string pending = std::move(tail_);
  tail_.clear();
  pending.append(bytes);
  std::string out;
  out.reserve(pending.size());
  for (size_t at = 0; at < pending.size();) {
    const Scan scan = scan_character(pending, at);
    if (scan.state == Scan::kIncomplete) {
      tail_ = pending.substr(at);
      break;
    }
    out += scan.state == Scan::kComplete ? std::string_view(pending).substr(at, scan.n_bytes)
                                         : kReplacementCharacter;
    at += scan.n_bytes;
  }
  return out;
}

std::string Utf8Stream::flush() {
  const bool waiting = !tail_.empty();
  tail_.clear();
  return std::string(waiting ? kReplacementCharacter : "");
}

CodePoint decode_utf8(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[at + i]); };
  const char32_t lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  if (lead < 0xE0) return {(lead & 0x1F) << 6 | (byte(1) & 0x3F), 2};
  const char32_t second = byte(1) & 0x3F, third = byte(2) & 0x3F;
  if (lead < 0xF0) return {(lead & 0x0F) << 12 | second << 6 | third, 3};
  return {(lead & 0x07) << 18 | second << 12 | third << 6 | (byte(3) & 0x3F), 4};
}

void append_utf8(std::string& out, char32_t code_point) {
  const auto put = [&](char32_t byte) { out += static_cast<char>(byte); };
  if (code_point < 0x80) {
    put(code_point);
  } else if (code_point < 0x800) {
    put(0xC0 | code_point >> 6);
    put(0x80 | (code_point & 0x3F));
  } else if (code_point < 0x10000) {
    put(0xE0 | code_point >> 12);
    put(0x80 | (code_point >> 6 & 0x3F));
    put(0x80 | (code_point & 0x3F));
  } else {
    put(0xF0 | code_point >> 18);
    put(0x80 | (code_point >> 12 & 0x3F));
    put(0x80 | (code_point >> 6 & 0x3F));
    put(0x80 | (code_point & 0x3F));
  }
}

size_t skip_code_points(std::string_view text, size_t at, size_t n) {
  while (n > 0) {
    if (at + 8 <= text.size()) {
      const size_t n_ascii = std::min(n, leading_ascii(text.data() + at));
      at += n_ascii;
      n -= n_ascii;
      if (n == 0 || n_ascii == 8) continue;
    }
    const auto lead = static_cast<unsigned char>(text[at]);
    at += lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
    --n;
  }
  return at;
}

size_t count_code_points(std::string_view text) {
  size_t n = 0;
  for (const char c : text) n += (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  return n;
}

namespace {

struct LeadByte {
  size_t length;                         // 0: cannot start a character
  unsigned char second_min, second_max;  // narrower than 80-BF after E0, ED, F0, F4
};

LeadByte classify(unsigned char lead) {
  if (lead < 0x80) return {1, 0, 0};
  if (lead < 0xC2) return {0, 0, 0};
  if (lead < 0xE0) return {2, 0x80, 0xBF};
  if (lead == 0xE0) return {3, 0xA0, 0xBF};
  if (lead == 0xED) return {3, 0x80, 0x9F};
  if (lead < 0xF0) return {3, 0x80, 0xBF};
  if (lead == 0xF0) return {4, 0x90, 0xBF};
  if (lead < 0xF4) return {4, 0x80, 0xBF};
  if (lead == 0xF4) return {4, 0x80, 0x8F};
  return {0, 0, 0};
}

Scan scan_character(std::string_view text, size_t at) {
  const LeadByte lead = classify(static_cast<unsigned char>(text[at]));
  if (lead.length == 0) return {1, Scan::kInvalid};
  for (size_t i = 1; i < lead.length; ++i) {
    if (at + i == text.size()) return {i, Scan::kIncomplete};
    const auto byte = static_cast<unsigned char>(text[at + i]);
    const unsigned char min = i == 1 ? lead.second_min : 0x80;
    const unsigned char max = i == 1 ? lead.second_max : 0xBF;
    if (byte < min || byte > max) return {i, Scan::kInvalid};
  }
  return {lead.length, Scan::kComplete};
}

}  // namespace
}  // namespace tandem
