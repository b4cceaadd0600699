// Python's operators on values: truth, comparison, arithmetic, membership, indexing, printing.
// Python's exceptions, such as TypeError, are thrown as Error.
#pragma once
#include <nlohmann/json.hpp>
#include <optional>

#include "text/jinja/value.h"

namespace tandem::jinja {

std::string_view type_name(const Value& value);  // "str", "dict", ..

// An optional argument of the filter or method `name`.
int64_t integer_or(const Value& value, int64_t default_value, std::string_view name);

std::string name_of(const Value& undefined);  // "'x'", for messages

bool is_true(const Value& value);
bool equal(Heap& heap, const Value& a, const Value& b);
int compare(Heap& heap, const Value& a, const Value& b);  // -1, 0 or 1; 2: unordered (NaN)
bool contains(Heap& heap, const Value& container, const Value& member);

enum class Comparison {
  kEqual,
  kNotEqual,
  kLess,
  kLessEqual,
  kGreater,
  kGreaterEqual,
  kIn,
  kNotIn
};
bool compare_values(Heap& heap, Comparison comparison, const Value& a, const Value& b);

enum class Operator { kAdd, kSubtract, kMultiply, kDivide, kFloorDivide, kModulo, kPower };
Value arithmetic(Heap& heap, Operator op, const Value& a, const Value& b);
Value negate(const Value& a);

size_t length_of(const Value& value);
Items iterate(Heap& heap, const Value& value);  // characters, items, keys

Value* find_entry(Heap& heap, Entries& entries, const Value& key);
Value* find_entry(Heap& heap, Entries& entries, std::string_view key);
void set_entry(Heap& heap, Entries& entries, const Value& key, const Value& value);

// Methods of str, list and dict (methods.cpp).
bool has_method(const Value& self, std::string_view name);
// Throws Error unless has_method(self, name) and the arguments fit.
Value call_method(Heap& heap, const Value& self, std::string_view name, const Arguments& arguments);

Value get_attribute(Heap& heap, const Value& value, const String& name);  // value.name
Value get_item(Heap& heap, const Value& value, const Value& key);         // value[key]
Value get_slice(Heap& heap, const Value& value, const Value& start, const Value& stop,
                const Value& step);

void write_text(Heap& heap, const Value& value, TextBuilder& out);  // str(value)
std::string to_text(Heap& heap, const Value& value);                // str(value)
std::string format_real(double value);                              // repr() of a Python float
Value string_from(Heap& heap, const Value& value);  // str(value); a string is not copied

struct JsonStyle {
  bool ensure_ascii = false;
  std::optional<std::string> indent;  // per level; nullopt: all on one line
  std::string item_separator = ", ", key_separator = ": ";
  bool sort_keys = false;
};
Value to_json(Heap& heap, const Value& value, const JsonStyle& style);
// `given`: strings and keys are marked as coming from the context (String::given).
Value value_from_json(Heap& heap, const nlohmann::ordered_json& json, bool given);

}  // namespace tandem::jinja
