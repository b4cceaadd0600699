// Filters that compute texts and numbers from single values.
#include <algorithm>
#include <cmath>

#include "text/jinja/filters.h"
#include "text/jinja/lexer.h"
#include "text/jinja/operations.h"
#include "text/jinja/text_functions.h"

namespace tandem::jinja {
namespace {

struct NamedFilter {
  std::string_view name;
  Filter filter;
};

int64_t integer_or(const Value& value, int64_t absent, std::string_view what) {
  if (value.is(Kind::kUndefined) || value.is(Kind::kNone)) return absent;
  require(value.is_integral(), "{} needs an int, not {}", what, type_name(value));
  return value.as_integer();
}

std::string separator_of(const Value& separators, size_t i) {
  require(separators.is_sequence() && separators.items->size() == 2 &&
              (*separators.items)[i].is(Kind::kString),
          "tojson: separators must be two texts");
  return std::string((*separators.items)[i].text());
}

Value tojson(Heap& heap, const Arguments& arguments) {
  const Items bound =
      arguments.bind("tojson", {"value", "ensure_ascii", "indent", "separators", "sort_keys"});
  JsonStyle style{.ensure_ascii = is_true(bound[1]), .indent = {}, .sort_keys = is_true(bound[4])};
  const Value& indent = bound[2];
  if (indent.is(Kind::kString)) {
    style.indent = std::string(indent.text());
  } else if (!indent.is(Kind::kNone) && !indent.is(Kind::kUndefined)) {
    const int64_t width = std::max<int64_t>(integer_or(indent, 0, "tojson(indent)"), 0);
    heap.spend_bytes(static_cast<uint64_t>(width));
    style.indent = std::string(static_cast<size_t>(width), ' ');
  }
  if (style.indent) style.item_separator = ",";
  if (!bound[3].is(Kind::kNone) && !bound[3].is(Kind::kUndefined)) {
    style.item_separator = separator_of(bound[3], 0);
    style.key_separator = separator_of(bound[3], 1);
  }
  return to_json(heap, bound[0], style);
}

Value trim(Heap& heap, const Arguments& arguments) {
  const Items bound = arguments.bind("trim", {"value", "chars"});
  const bool has_set = bound[1].is(Kind::kString);
  const Value text = string_from(heap, bound[0]);
  heap.spend_steps(text.text().size() * (has_set ? bound[1].text().size() : 1) / 64);
  return heap.part(*text.string,
                   strip(text.text(), Side::kBoth, has_set ? bound[1].string : nullptr));
}

template <std::string (*change)(std::string_view)>
Value change_text(Heap& heap, const Arguments& arguments) {
  const Items bound = arguments.bind("upper", {"value"});
  return changed(heap, *string_from(heap, bound[0]).string, change);
}

Value replace_text(Heap& heap, const Arguments& arguments) {
  const Items bound = arguments.bind("replace", {"value", "old", "new", "count"});
  const Value text = string_from(heap, bound[0]), from = string_from(heap, bound[1]);
  const Value to = string_from(heap, bound[2]);
  return replace(heap, *text.string, from.text(), *to.string, integer_or(bound[3], -1, "replace"));
}

Value indent(Heap& heap, const Arguments& arguments) {
  const Items bound = arguments.bind("indent", {"value", "width", "first", "blank"});
  Value step = bound[1];
  if (!step.is(Kind::kString)) {
    const int64_t width = std::max<int64_t>(integer_or(step, 4, "indent"), 0);
    heap.spend_bytes(static_cast<uint64_t>(width));
    step = heap.string(std::string(static_cast<size_t>(width), ' '));
  }
  const Value text = string_from(heap, bound[0]);
  heap.spend_bytes(text.text().size());
  return indent_lines(heap, *text.string, *step.string, is_true(bound[2]), is_true(bound[3]));
}

Value string(Heap& heap, const Arguments& arguments) {
  return string_from(heap, arguments.bind("string", {"value"})[0]);
}

Value as_it_is(Heap&, const Arguments& arguments) { return arguments.bind("safe", {"value"})[0]; }

Value default_value(Heap& heap, const Arguments& arguments) {
  const Items bound = arguments.bind("default", {"value", "default_value", "boolean"});
  const bool missing = bound[0].is(Kind::kUndefined) || (is_true(bound[2]) && !is_true(bound[0]));
  if (!missing) return bound[0];
  return bound[1].is(Kind::kUndefined) ? heap.string("") : bound[1];
}

Value truncated(double value) {
  require(std::fabs(value) < 9.2e18, "{} is beyond 64 bits", value);
  return integer(static_cast<int64_t>(value));
}

Value to_integer(Heap&, const Arguments& arguments) {
  const Items bound = arguments.bind("int", {"value", "default", "base"});
  const Value otherwise = bound[1].is(Kind::kUndefined) ? integer(0) : bound[1];
  const Value& value = bound[0];
  require(!value.is(Kind::kUndefined), "int of a value that is undefined");
  if (value.is_integral()) return integer(value.as_integer());
  if (value.is(Kind::kFloat)) return std::isfinite(value.real) ? truncated(value.real) : otherwise;
  if (!value.is(Kind::kString)) return otherwise;
  const int64_t base = integer_or(bound[2], 10, "int");
  require(base >= 2 && base <= 36, "int: the base must be 2 to 36, not {}", base);
  const std::string_view text = strip(value.text(), Side::kBoth);
  if (const auto parsed = parse_integer(text, static_cast<int>(base))) return integer(*parsed);
  const std::optional<double> parsed = parse_real(text);
  return parsed && std::isfinite(*parsed) ? truncated(*parsed) : otherwise;
}

Value to_float(Heap&, const Arguments& arguments) {
  const Items bound = arguments.bind("float", {"value", "default"});
  const Value& value = bound[0];
  require(!value.is(Kind::kUndefined), "float of a value that is undefined");
  if (value.is_number()) return real(value.as_real());
  if (value.is(Kind::kString))
    if (const auto parsed = parse_real(strip(value.text(), Side::kBoth))) return real(*parsed);
  return bound[1].is(Kind::kUndefined) ? real(0) : bound[1];
}

Value absolute(Heap&, const Arguments& arguments) {
  const Value value = arguments.bind("abs", {"value"})[0];
  require(value.is_number(), "abs needs a number, not {}", type_name(value));
  if (value.is(Kind::kFloat)) return real(std::fabs(value.real));
  return value.as_integer() < 0 ? negate(value) : integer(value.as_integer());
}

// Rounds the exact decimal value, as Python does: the double 2.675 is below the midpoint.
double round_to_even(double value, int precision) {
  if (precision < 0) {
    const double unit = std::pow(10.0, -precision);
    return std::nearbyint(value / unit) * unit;
  }
  return parse_real(fmt::format("{:.{}f}", value, precision)).value_or(value);
}

Value round_number(Heap&, const Arguments& arguments) {
  const Items bound = arguments.bind("round", {"value", "precision", "method"});
  require(bound[0].is_number(), "round needs a number, not {}", type_name(bound[0]));
  const int64_t precision = integer_or(bound[1], 0, "round");
  require(precision >= -300 && precision <= 300, "round: the precision must be within 300, not {}",
          precision);
  const std::string_view method = bound[2].is(Kind::kString) ? bound[2].text() : "common";
  const double value = bound[0].as_real();
  if (!std::isfinite(value)) return bound[0];
  if (method == "common") {
    if (!bound[0].is(Kind::kFloat) && precision >= 0) return integer(bound[0].as_integer());
    const double rounded = round_to_even(value, static_cast<int>(precision));
    return bound[0].is(Kind::kFloat) ? real(rounded) : truncated(rounded);
  }
  require(method == "ceil" || method == "floor",
          "round: the method must be common, ceil or floor, not {}", method);
  const double unit = std::pow(10.0, static_cast<double>(precision));
  return real((method == "ceil" ? std::ceil(value * unit) : std::floor(value * unit)) / unit);
}

constexpr NamedFilter kFilters[] = {
    {"tojson", tojson},
    {"trim", trim},
    {"upper", change_text<to_upper>},
    {"lower", change_text<to_lower>},
    {"capitalize", change_text<capitalize>},
    {"title", change_text<title_of_filter>},
    {"replace", replace_text},
    {"indent", indent},
    {"string", string},
    {"safe", as_it_is},
    {"default", default_value},
    {"d", default_value},
    {"int", to_integer},
    {"float", to_float},
    {"abs", absolute},
    {"round", round_number},
};

}  // namespace

Filter find_filter(std::string_view name) {
  const Filter found = find_text_filter(name);
  return found ? found : find_sequence_filter(name);
}

Filter find_text_filter(std::string_view name) {
  for (const NamedFilter& known : kFilters)
    if (known.name == name) return known.filter;
  return nullptr;
}

}  // namespace tandem::jinja
