// The filters of the template language.

#include <algorithm>
#include <cmath>

#include "text/jinja/functions.h"
#include "text/jinja/lexer.h"
#include "text/jinja/operations.h"
#include "text/jinja/text_functions.h"

namespace tandem::jinja {
namespace {

// Lists, dicts and the characters of strings.

// value.a.b for the attribute "a.b", value[1] for 1; the value itself when there is no attribute.
// `missing`, unless it is undefined or None, replaces each part that is undefined.
Value attribute_of(Heap& heap, const Value& value, const Value& attribute,
                   const Value& missing = {}) {
  if (attribute.is(Kind::kUndefined) || attribute.is(Kind::kNone)) return value;
  const auto part_of = [&](const Value& object, const Value& part) {
    const Value found = get_item(heap, object, part);
    const bool replaced = found.is(Kind::kUndefined) && !missing.is(Kind::kNone);
    return replaced && !missing.is(Kind::kUndefined) ? missing : found;
  };
  if (attribute.is_integral()) return part_of(value, attribute);
  require(attribute.is(Kind::kString), "an attribute must be a str or int, not {}",
          type_name(attribute));
  const String dot = make_string(".");
  Value object = value;
  for (const Value& part : split(heap, *attribute.string, &dot, -1)) {
    const auto index = parse_integer(part.text(), 10);
    object = part_of(object, index ? integer(*index) : part);
  }
  return object;
}

// The key used for sorting and comparing: strings are lower-cased unless case_sensitive.
Value sort_key(Heap& heap, const Value& value, bool case_sensitive) {
  if (case_sensitive || !value.is(Kind::kString)) return value;
  return heap.string(to_lower(value.text()));
}

Value length(Heap&, const Arguments& arguments) {
  return integer(static_cast<int64_t>(length_of(arguments.bind("length", {"value"})[0])));
}

Value join(Heap& heap, const Arguments& arguments) {
  const Items bound = arguments.bind("join", {"value", "d", "attribute"});
  const Value separator = string_from(heap, bound[1]);
  const Items items = iterate(heap, bound[0]);
  TextBuilder out(heap);
  for (size_t i = 0; i < items.size(); ++i) {
    if (i > 0) out.add(*separator.string);
    write_text(heap, attribute_of(heap, items[i], bound[2]), out);
  }
  return out.value();
}

Value first(Heap& heap, const Arguments& arguments) {
  const Items items = iterate(heap, arguments.bind("first", {"value"})[0]);
  return items.empty() ? heap.undefined("first item of an empty sequence") : items.front();
}

Value last(Heap& heap, const Arguments& arguments) {
  const Items items = iterate(heap, arguments.bind("last", {"value"})[0]);
  return items.empty() ? heap.undefined("last item of an empty sequence") : items.back();
}

Value reverse(Heap& heap, const Arguments& arguments) {
  const Value value = arguments.bind("reverse", {"value"})[0];
  Items items = iterate(heap, value);
  std::reverse(items.begin(), items.end());
  if (!value.is(Kind::kString)) return heap.list(std::move(items));
  TextBuilder text(heap);
  for (const Value& item : items) text.add(*item.string);
  return text.value();
}

Value list(Heap& heap, const Arguments& arguments) {
  return heap.list(iterate(heap, arguments.bind("list", {"value"})[0]));
}

Value items(Heap& heap, const Arguments& arguments) {
  const Value value = arguments.bind("items", {"value"})[0];
  if (value.is(Kind::kUndefined)) return heap.list({});
  require(value.is(Kind::kDict), "items needs a dict, not {}", type_name(value));
  return heap.list(entry_tuples(heap, value));
}

// `values` in the order of `keys`; the sort is stable.
Items sorted(Heap& heap, const Items& values, const Items& keys, bool reversed) {
  std::vector<size_t> order(values.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return compare(heap, reversed ? keys[b] : keys[a], reversed ? keys[a] : keys[b]) == -1;
  });
  Items out;
  for (const size_t i : order) out.push_back(values[i]);
  return out;
}

Value dictsort(Heap& heap, const Arguments& arguments) {
  const Items bound = arguments.bind("dictsort", {"value", "case_sensitive", "by", "reverse"});
  require(bound[0].is(Kind::kDict), "dictsort needs a dict, not {}", type_name(bound[0]));
  const std::string_view by = bound[2].is(Kind::kString) ? bound[2].text() : "key";
  require(by == "key" || by == "value", "dictsort: by must be key or value, not {}", by);
  const Items pairs = entry_tuples(heap, bound[0]);
  Items keys;
  for (const Value& pair : pairs)
    keys.push_back(sort_key(heap, (*pair.items)[by == "key" ? 0 : 1], is_true(bound[1])));
  return heap.list(sorted(heap, pairs, keys, is_true(bound[3])));
}

Value sort(Heap& heap, const Arguments& arguments) {
  const Items bound = arguments.bind("sort", {"value", "reverse", "case_sensitive", "attribute"});
  const Items values = iterate(heap, bound[0]);
  Items keys;
  for (const Value& value : values)
    keys.push_back(sort_key(heap, attribute_of(heap, value, bound[3]), is_true(bound[2])));
  return heap.list(sorted(heap, values, keys, is_true(bound[1])));
}

Value unique(Heap& heap, const Arguments& arguments) {
  const Items bound = arguments.bind("unique", {"value", "case_sensitive", "attribute"});
  Items kept, keys;
  for (const Value& value : iterate(heap, bound[0])) {
    const Value key = sort_key(heap, attribute_of(heap, value, bound[2]), is_true(bound[1]));
    const bool seen = std::any_of(keys.begin(), keys.end(),
                                  [&](const Value& known) { return equal(heap, known, key); });
    if (seen) continue;
    kept.push_back(value);
    keys.push_back(key);
  }
  return heap.list(std::move(kept));
}

Value min_or_max(Heap& heap, const Items& bound, int wanted) {
  const Items values = iterate(heap, bound[0]);
  if (values.empty()) return heap.undefined("minimum or maximum of an empty sequence");
  const auto key = [&](const Value& value) {
    return sort_key(heap, attribute_of(heap, value, bound[2]), is_true(bound[1]));
  };
  Value best = values[0], best_key = key(best);
  for (size_t i = 1; i < values.size(); ++i) {
    const Value candidate = key(values[i]);
    if (compare(heap, candidate, best_key) != wanted) continue;
    best = values[i];
    best_key = candidate;
  }
  return best;
}

Value min(Heap& heap, const Arguments& arguments) {
  return min_or_max(heap, arguments.bind("min", {"value", "case_sensitive", "attribute"}), -1);
}

Value max(Heap& heap, const Arguments& arguments) {
  return min_or_max(heap, arguments.bind("max", {"value", "case_sensitive", "attribute"}), 1);
}

Value sum(Heap& heap, const Arguments& arguments) {
  const Items bound = arguments.bind("sum", {"value", "attribute", "start"});
  Value total = bound[2].is(Kind::kUndefined) ? integer(0) : bound[2];
  for (const Value& value : iterate(heap, bound[0]))
    total = arithmetic(heap, Operator::kAdd, total, attribute_of(heap, value, bound[1]));
  return total;
}

// The filter map(attribute=.., default=..) or map(filter, arguments of the filter ..).
Value map(Heap& heap, const Arguments& arguments) {
  require(!arguments.positional.empty(), "map needs a value");
  Items out;
  if (arguments.positional.size() == 1) {
    const Items bound = arguments.bind("map", {"value", "attribute", "default"});
    require(!bound[1].is(Kind::kUndefined), "map needs a filter or attribute=..");
    for (const Value& value : iterate(heap, bound[0]))
      out.push_back(attribute_of(heap, value, bound[1], bound[2]));
    return heap.list(std::move(out));
  }
  const Value& name = arguments.positional[1];
  const Filter filter = name.is(Kind::kString) ? find_filter(name.text()) : nullptr;
  require(filter != nullptr, "map: there is no filter '{}'", to_text(heap, name));
  Arguments inner = arguments;
  inner.positional.erase(inner.positional.begin());
  const Heap::NestingGuard nested(heap);
  for (const Value& value : iterate(heap, arguments.positional[0])) {
    heap.spend_steps(1 + inner.positional.size());
    inner.positional[0] = value;
    out.push_back(filter(heap, inner));
  }
  return heap.list(std::move(out));
}

// select, reject, selectattr and rejectattr: keeps the items whose test gives `wanted`. With
// `by_attribute` the test is applied to an attribute of the item.
Value select_items(Heap& heap, const Arguments& arguments, bool by_attribute, bool wanted) {
  const size_t test_index = by_attribute ? 2 : 1;
  require(arguments.positional.size() >= test_index, "selectattr needs an attribute");
  const Value attribute = by_attribute ? arguments.positional[1] : none();
  ValueTest test = nullptr;
  Arguments inner;
  if (arguments.positional.size() > test_index) {
    const Value& name = arguments.positional[test_index];
    test = name.is(Kind::kString) ? find_value_test(name.text()) : nullptr;
    require(test != nullptr, "select: there is no test '{}'", to_text(heap, name));
    inner.positional.assign(arguments.positional.begin() + static_cast<std::ptrdiff_t>(test_index),
                            arguments.positional.end());
    inner.named = arguments.named;
  }
  Items out;
  for (const Value& value : iterate(heap, arguments.positional[0])) {
    heap.spend_steps(1 + inner.positional.size());
    const Value tested = attribute_of(heap, value, attribute);
    if (test) inner.positional[0] = tested;
    if ((test ? test(heap, inner) : is_true(tested)) == wanted) out.push_back(value);
  }
  return heap.list(std::move(out));
}

template <bool by_attribute, bool wanted>
Value select_filter(Heap& heap, const Arguments& arguments) {
  return select_items(heap, arguments, by_attribute, wanted);
}

// Strings and numbers from single values.

std::string separator_of(const Value& separators, size_t i) {
  require(separators.is_sequence() && separators.items->size() == 2 &&
              (*separators.items)[i].is(Kind::kString),
          "tojson: separators must be two strings");
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

template <std::string (*convert)(std::string_view)>
Value map_text_filter(Heap& heap, const Arguments& arguments) {
  const Items bound = arguments.bind("upper", {"value"});
  return map_text(heap, *string_from(heap, bound[0]).string, convert);
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

Value safe(Heap&, const Arguments& arguments) { return arguments.bind("safe", {"value"})[0]; }

Value default_value(Heap& heap, const Arguments& arguments) {
  const Items bound = arguments.bind("default", {"value", "default_value", "boolean"});
  const bool missing = bound[0].is(Kind::kUndefined) || (is_true(bound[2]) && !is_true(bound[0]));
  if (!missing) return bound[0];
  return bound[1].is(Kind::kUndefined) ? heap.string("") : bound[1];
}

Value truncated(double value) {
  require(std::fabs(value) < 9.2e18, "{} exceeds 64 bits", value);
  return integer(static_cast<int64_t>(value));
}

Value to_integer(Heap&, const Arguments& arguments) {
  const Items bound = arguments.bind("int", {"value", "default", "base"});
  const Value fallback = bound[1].is(Kind::kUndefined) ? integer(0) : bound[1];
  const Value& value = bound[0];
  require(!value.is(Kind::kUndefined), "int: the value is undefined");
  if (value.is_integral()) return integer(value.as_integer());
  if (value.is(Kind::kFloat)) return std::isfinite(value.real) ? truncated(value.real) : fallback;
  if (!value.is(Kind::kString)) return fallback;
  const int64_t base = integer_or(bound[2], 10, "int");
  require(base >= 2 && base <= 36, "int: the base must be 2 to 36, not {}", base);
  const std::string_view text = strip(value.text(), Side::kBoth);
  if (const auto parsed = parse_integer(text, static_cast<int>(base))) return integer(*parsed);
  const std::optional<double> parsed = parse_real(text);
  return parsed && std::isfinite(*parsed) ? truncated(*parsed) : fallback;
}

Value to_float(Heap&, const Arguments& arguments) {
  const Items bound = arguments.bind("float", {"value", "default"});
  const Value& value = bound[0];
  require(!value.is(Kind::kUndefined), "float: the value is undefined");
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

constexpr struct {
  std::string_view name;
  Filter filter;
} kFilters[] = {
    {"tojson", tojson},
    {"trim", trim},
    {"upper", map_text_filter<to_upper>},
    {"lower", map_text_filter<to_lower>},
    {"capitalize", map_text_filter<capitalize>},
    {"title", map_text_filter<title_filter>},
    {"replace", replace_text},
    {"indent", indent},
    {"string", string},
    {"safe", safe},
    {"default", default_value},
    {"d", default_value},
    {"int", to_integer},
    {"float", to_float},
    {"abs", absolute},
    {"round", round_number},
    {"length", length},
    {"count", length},
    {"join", join},
    {"first", first},
    {"last", last},
    {"reverse", reverse},
    {"list", list},
    {"items", items},
    {"dictsort", dictsort},
    {"sort", sort},
    {"unique", unique},
    {"min", min},
    {"max", max},
    {"sum", sum},
    {"map", map},
    {"select", select_filter<false, true>},
    {"reject", select_filter<false, false>},
    {"selectattr", select_filter<true, true>},
    {"rejectattr", select_filter<true, false>},
};

}  // namespace

Filter find_filter(std::string_view name) {
  for (const auto& known : kFilters)
    if (known.name == name) return known.filter;
  return nullptr;
}

}  // namespace tandem::jinja
