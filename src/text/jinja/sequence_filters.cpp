// Filters of lists, dicts and the characters of texts.
#include <algorithm>

#include "text/jinja/filters.h"
#include "text/jinja/functions.h"
#include "text/jinja/lexer.h"
#include "text/jinja/operations.h"
#include "text/jinja/text_functions.h"

namespace tandem::jinja {
namespace {

struct NamedFilter {
  std::string_view name;
  Filter filter;
};

// value.a.b for the attribute "a.b", value[1] for 1; the value itself when there is no attribute.
Value attribute_of(Heap& heap, const Value& value, const Value& attribute) {
  if (attribute.is(Kind::kUndefined) || attribute.is(Kind::kNone)) return value;
  if (attribute.is_integral()) return get_item(heap, value, attribute);
  require(attribute.is(Kind::kString), "an attribute must be a str or int, not {}",
          type_name(attribute));
  const String dot = make_string(".");
  Value held = value;
  for (const Value& part : split(heap, *attribute.string, &dot, -1)) {
    const auto index = parse_integer(part.text(), 10);
    held = get_item(heap, held, index ? integer(*index) : part);
  }
  return held;
}

// The key used for sorting and comparing: texts are lower-cased unless case_sensitive.
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
  return items.empty() ? heap.undefined("first item of nothing") : items.front();
}

Value last(Heap& heap, const Arguments& arguments) {
  const Items items = iterate(heap, arguments.bind("last", {"value"})[0]);
  return items.empty() ? heap.undefined("last item of nothing") : items.back();
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

Value extreme(Heap& heap, const Items& bound, int wanted) {
  const Items values = iterate(heap, bound[0]);
  if (values.empty()) return heap.undefined("extreme item of nothing");
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
  return extreme(heap, arguments.bind("min", {"value", "case_sensitive", "attribute"}), -1);
}

Value max(Heap& heap, const Arguments& arguments) {
  return extreme(heap, arguments.bind("max", {"value", "case_sensitive", "attribute"}), 1);
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
    for (const Value& value : iterate(heap, bound[0])) {
      const Value held = attribute_of(heap, value, bound[1]);
      out.push_back(held.is(Kind::kUndefined) && !bound[2].is(Kind::kUndefined) ? bound[2] : held);
    }
    return heap.list(std::move(out));
  }
  const Value& name = arguments.positional[1];
  const Filter filter = name.is(Kind::kString) ? find_filter(name.text()) : nullptr;
  require(filter != nullptr, "map: there is no filter '{}'", to_text(heap, name));
  Arguments inner = arguments;
  inner.positional.erase(inner.positional.begin());
  const Heap::Nested nested(heap);
  for (const Value& value : iterate(heap, arguments.positional[0])) {
    heap.spend_steps(1 + inner.positional.size());
    inner.positional[0] = value;
    out.push_back(filter(heap, inner));
  }
  return heap.list(std::move(out));
}

// select, reject, selectattr and rejectattr: keeps the items whose test gives `wanted`. With
// `by_attribute` the test is applied to an attribute of the item.
Value choose(Heap& heap, const Arguments& arguments, bool by_attribute, bool wanted) {
  const size_t first_of_test = by_attribute ? 2 : 1;
  require(arguments.positional.size() >= first_of_test, "selectattr needs an attribute");
  const Value attribute = by_attribute ? arguments.positional[1] : none();
  ValueTest test = nullptr;
  Arguments inner;
  if (arguments.positional.size() > first_of_test) {
    const Value& name = arguments.positional[first_of_test];
    test = name.is(Kind::kString) ? find_value_test(name.text()) : nullptr;
    require(test != nullptr, "select: there is no test '{}'", to_text(heap, name));
    inner.positional.assign(
        arguments.positional.begin() + static_cast<std::ptrdiff_t>(first_of_test),
        arguments.positional.end());
    inner.named = arguments.named;
  }
  Items out;
  for (const Value& value : iterate(heap, arguments.positional[0])) {
    heap.spend_steps(1 + inner.positional.size());
    const Value looked_at = attribute_of(heap, value, attribute);
    if (test) inner.positional[0] = looked_at;
    if ((test ? test(heap, inner) : is_true(looked_at)) == wanted) out.push_back(value);
  }
  return heap.list(std::move(out));
}

template <bool by_attribute, bool wanted>
Value choose_filter(Heap& heap, const Arguments& arguments) {
  return choose(heap, arguments, by_attribute, wanted);
}

constexpr NamedFilter kFilters[] = {
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
    {"select", choose_filter<false, true>},
    {"reject", choose_filter<false, false>},
    {"selectattr", choose_filter<true, true>},
    {"rejectattr", choose_filter<true, false>},
};

}  // namespace

Filter find_sequence_filter(std::string_view name) {
  for (const NamedFilter& known : kFilters)
    if (known.name == name) return known.filter;
  return nullptr;
}

}  // namespace tandem::jinja
