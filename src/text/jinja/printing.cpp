// Values as text: Python's str() and repr(), and conversion to and from JSON.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "io/json.h"
#include "text/jinja/operations.h"
#include "text/jinja/text_functions.h"
#include "text/utf8.h"

namespace tandem::jinja {
namespace {

void write_repr(Heap& heap, const Value& value, TextBuilder& out);
void write_json(Heap& heap, const Value& value, const JsonStyle& style, size_t level,
                TextBuilder& out);

std::string escaped(char32_t c) {
  switch (c) {
    case '\n':
      return "\\n";
    case '\r':
      return "\\r";
    case '\t':
      return "\\t";
    default:
      break;
  }
  const auto code = static_cast<uint32_t>(c);
  if (code < 0x100) return fmt::format("\\x{:02x}", code);
  return code < 0x10000 ? fmt::format("\\u{:04x}", code) : fmt::format("\\U{:08x}", code);
}

void write_quoted(const String& whole, TextBuilder& out) {
  const std::string_view text = whole.text;
  const bool has_single = text.find('\'') != std::string_view::npos;
  const char quote = has_single && text.find('"') == std::string_view::npos ? '"' : '\'';
  const std::string_view around(&quote, 1);
  out.add(around);
  for_each_span(whole, [&](std::string_view span, bool given) {
    for (size_t at = 0; at < span.size();) {
      const CodePoint c = decode_utf8(span, at);
      if (c.value == '\\' || c.value == static_cast<char32_t>(quote)) out.add("\\", given);
      out.add(is_printable(c.value) ? std::string(span.substr(at, c.n_bytes)) : escaped(c.value),
              given);
      at += c.n_bytes;
    }
  });
  out.add(around);
}

void write_entries(Heap& heap, const Entries& entries, TextBuilder& out) {
  out.add("{");
  for (size_t i = 0; i < entries.size(); ++i) {
    if (i > 0) out.add(", ");
    write_repr(heap, entries[i].first, out);
    out.add(": ");
    write_repr(heap, entries[i].second, out);
  }
  out.add("}");
}

void write_items(Heap& heap, const Value& value, TextBuilder& out) {
  const Items& items = *value.items;
  out.add(value.is(Kind::kList) ? "[" : "(");
  for (size_t i = 0; i < items.size(); ++i) {
    if (i > 0) out.add(", ");
    write_repr(heap, items[i], out);
  }
  if (value.is(Kind::kTuple) && items.size() == 1) out.add(",");
  out.add(value.is(Kind::kList) ? "]" : ")");
}

void write_repr(Heap& heap, const Value& value, TextBuilder& out) {
  const Heap::NestingGuard nested(heap);
  heap.spend_steps(1);
  switch (value.kind) {
    case Kind::kUndefined:
      return out.add("Undefined");
    case Kind::kNone:
      return out.add("None");
    case Kind::kBool:
      return out.add(value.boolean ? "True" : "False");
    case Kind::kInt:
      return out.add(fmt::format("{}", value.integer));
    case Kind::kFloat:
      return out.add(format_real(value.real));
    case Kind::kString:
      return write_quoted(*value.string, out);
    case Kind::kList:
    case Kind::kTuple:
      return write_items(heap, value, out);
    case Kind::kDict:
      return write_entries(heap, *value.entries, out);
    case Kind::kNamespace:
      out.add("<Namespace ");
      write_entries(heap, *value.entries, out);
      return out.add(">");
    case Kind::kLoop:
      return out.add(
          fmt::format("<LoopContext {}/{}>", value.loop->at + 1, value.loop->items->size()));
    case Kind::kFunction:
      return out.add(fmt::format("<Function '{}'>", value.function->name));
  }
}

std::string escape_of(char32_t c, bool ensure_ascii) {
  const auto code = static_cast<uint32_t>(c);
  if (needs_json_escape(c) || (ensure_ascii && code >= 0x7F && code < 0x10000))
    return json_escape(c);
  if (!ensure_ascii || code < 0x10000) return "";  // needs no escape
  return fmt::format("\\u{:04x}\\u{:04x}", 0xD800 + ((code - 0x10000) >> 10),
                     0xDC00 + ((code - 0x10000) & 0x3FF));
}

void write_json_string(const String& text, bool ensure_ascii, TextBuilder& out) {
  out.add("\"");
  for_each_span(text, [&](std::string_view span, bool given) {
    for (size_t at = 0; at < span.size();) {
      const CodePoint c = decode_utf8(span, at);
      const std::string escape = escape_of(c.value, ensure_ascii);
      out.add(escape.empty() ? span.substr(at, c.n_bytes) : std::string_view(escape), given);
      at += c.n_bytes;
    }
  });
  out.add("\"");
}

std::string json_real(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return format_real(value);
}

void write_json_key(Heap& heap, const Value& key, const JsonStyle& style, TextBuilder& out) {
  if (key.is(Kind::kString)) return write_json_string(*key.string, style.ensure_ascii, out);
  require(key.is_number() || key.is(Kind::kNone), "tojson: a key cannot be {}", type_name(key));
  out.add("\"");
  write_json(heap, key, style, 0, out);
  out.add("\"");
}

void break_line(const JsonStyle& style, size_t level, TextBuilder& out) {
  if (!style.indent) return;
  out.add("\n");
  for (size_t i = 0; i < level; ++i) out.add(*style.indent);
}

void write_json_dict(Heap& heap, const Value& value, const JsonStyle& style, size_t level,
                     TextBuilder& out) {
  heap.spend_bytes(value.entries->size() * 2 * sizeof(Value));
  Entries entries = *value.entries;
  if (style.sort_keys)
    std::stable_sort(entries.begin(), entries.end(), [&](const auto& a, const auto& b) {
      return compare(heap, a.first, b.first) == -1;
    });
  out.add("{");
  for (size_t i = 0; i < entries.size(); ++i) {
    if (i > 0) out.add(style.item_separator);
    break_line(style, level + 1, out);
    write_json_key(heap, entries[i].first, style, out);
    out.add(style.key_separator);
    write_json(heap, entries[i].second, style, level + 1, out);
  }
  if (!entries.empty()) break_line(style, level, out);
  out.add("}");
}

void write_json(Heap& heap, const Value& value, const JsonStyle& style, size_t level,
                TextBuilder& out) {
  const Heap::NestingGuard nested(heap);
  heap.spend_steps(1);
  switch (value.kind) {
    case Kind::kNone:
      return out.add("null");
    case Kind::kBool:
      return out.add(value.boolean ? "true" : "false");
    case Kind::kInt:
      return out.add(fmt::format("{}", value.integer));
    case Kind::kFloat:
      return out.add(json_real(value.real));
    case Kind::kString:
      return write_json_string(*value.string, style.ensure_ascii, out);
    case Kind::kList:
    case Kind::kTuple: {
      out.add("[");
      for (size_t i = 0; i < value.items->size(); ++i) {
        if (i > 0) out.add(style.item_separator);
        break_line(style, level + 1, out);
        write_json(heap, (*value.items)[i], style, level + 1, out);
      }
      if (!value.items->empty()) break_line(style, level, out);
      return out.add("]");
    }
    case Kind::kDict:
      return write_json_dict(heap, value, style, level, out);
    default:
      fail("tojson: {} cannot be written as JSON", type_name(value));
  }
}

Value number_from_json(const nlohmann::ordered_json& json) {
  if (json.is_number_float()) return real(json.get<double>());
  if (json.is_number_unsigned())
    require(json.get<uint64_t>() <= INT64_MAX, "the integer {} exceeds 64 bits",
            json.get<uint64_t>());
  return integer(json.get<int64_t>());
}

Value string_from_json(Heap& heap, const std::string& text, bool given) {
  const size_t bad = find_invalid_utf8(text);
  require(bad == std::string_view::npos, "a string is not UTF-8 at byte {}", bad);
  TextBuilder made(heap);
  made.add(text, given);
  return made.value();
}

}  // namespace

void write_text(Heap& heap, const Value& value, TextBuilder& out) {
  if (value.is(Kind::kString)) return out.add(*value.string);
  if (!value.is(Kind::kUndefined)) write_repr(heap, value, out);
}

std::string to_text(Heap& heap, const Value& value) {
  TextBuilder out(heap);
  write_text(heap, value, out);
  return out.take_text();
}

std::string format_real(double value) {
  if (std::isnan(value)) return "nan";
  std::string text = fmt::format("{}", value);
  if (text.find_first_of(".en") == std::string::npos) text += ".0";
  return text;
}

Value string_from(Heap& heap, const Value& value) {
  if (value.is(Kind::kString)) return value;
  TextBuilder out(heap);
  write_text(heap, value, out);
  return out.value();
}

Value to_json(Heap& heap, const Value& value, const JsonStyle& style) {
  TextBuilder out(heap);
  write_json(heap, value, style, 0, out);
  return out.value();
}

Value value_from_json(Heap& heap, const nlohmann::ordered_json& json, bool given) {
  const Heap::NestingGuard nested(heap);
  if (json.is_null() || json.is_discarded() || json.is_binary()) return none();
  if (json.is_boolean()) return boolean(json.get<bool>());
  if (json.is_number()) return number_from_json(json);
  if (json.is_string()) return string_from_json(heap, json.get_ref<const std::string&>(), given);
  if (json.is_array()) {
    Items items;
    for (const auto& item : json) items.push_back(value_from_json(heap, item, given));
    return heap.list(std::move(items));
  }
  Entries entries;
  for (const auto& [key, item] : json.items())
    entries.emplace_back(string_from_json(heap, key, given), value_from_json(heap, item, given));
  return heap.dict(std::move(entries));
}

}  // namespace tandem::jinja
