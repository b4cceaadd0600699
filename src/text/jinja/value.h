// Values of the template language, with Python's semantics, and the heap that owns them during one
// rendering and limits its work.
#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/check.h"
#include "text/utf8.h"

namespace tandem::jinja {

enum class Kind : uint8_t {
  kUndefined,
  kNone,
  kBool,
  kInt,
  kFloat,
  kString,
  kList,
  kTuple,
  kDict,
  kNamespace,
  kLoop,
  kFunction,
};

struct Value;
using Items = std::vector<Value>;
using Entries = std::vector<std::pair<Value, Value>>;  // keys in the order of insertion

struct String {
  std::string text;    // well-formed UTF-8
  size_t n_chars = 0;  // code points
  // Ranges of `text` that come from the context and not from the template: ascending, disjoint,
  // none empty. All operations on strings preserve them.
  std::vector<ByteRange> given = {};
  bool is_ascii() const { return n_chars == text.size(); }
};

struct Function;
struct Loop;

// 16 bytes, cheap to copy. The data it points to lives as long as the Heap (or the parsed
// template).
struct Value {
  Kind kind = Kind::kUndefined;
  union {
    bool boolean;
    int64_t integer;
    double real;
    const String* string = nullptr;  // kString; kUndefined: its name for messages, or null
    Items* items;                    // kList, kTuple
    Entries* entries;                // kDict, kNamespace
    Loop* loop;
    Function* function;
  };

  bool is(Kind k) const { return kind == k; }
  bool is_sequence() const { return is(Kind::kList) || is(Kind::kTuple); }
  bool is_number() const { return is(Kind::kBool) || is(Kind::kInt) || is(Kind::kFloat); }
  bool is_integral() const { return is(Kind::kBool) || is(Kind::kInt); }
  int64_t as_integer() const { return is(Kind::kBool) ? int64_t{boolean} : integer; }
  double as_real() const { return is(Kind::kFloat) ? real : static_cast<double>(as_integer()); }
  std::string_view text() const { return string->text; }  // kString only
};

Value none();
Value boolean(bool value);
Value integer(int64_t value);
Value real(double value);
Value string_of(const String& text);  // `text` outlives the value
String make_string(std::string text);

struct Arguments {
  Items positional;
  std::vector<std::pair<std::string_view, Value>> named;

  // The arguments in the order of `names`; missing ones are undefined. Throws Error when there are
  // too many, one has an unknown name, or one is given twice. `function` is used in messages.
  Items bind(std::string_view function, std::initializer_list<std::string_view> names) const;
};

struct Function {
  std::string name;
  std::function<Value(const Arguments&)> call;
};

struct Loop {
  const Items* items;
  size_t at;
};

// Limits of one rendering. A malicious template that exceeds one ends with an Error.
struct Limits {
  uint64_t steps = 20'000'000;
  uint64_t bytes = uint64_t{256} << 20;  // sum of all allocations, not the peak
  int depth = 200;                       // nesting of syntax, calls and values
};

// Owns all values created during a rendering, so that they may refer to each other in cycles.
class Heap {
 public:
  explicit Heap(const Limits& limits) : limits_(limits) {}

  void spend_steps(uint64_t n);
  void spend_bytes(uint64_t n);

  Value string(std::string text, std::vector<ByteRange> given = {});
  Value part(const String& of, std::string_view part);  // `part` lies in of.text
  Value list(Items items) { return {.kind = Kind::kList, .items = keep(std::move(items))}; }
  Value tuple(Items items) { return {.kind = Kind::kTuple, .items = keep(std::move(items))}; }
  Value dict(Entries entries) { return {.kind = Kind::kDict, .entries = keep(std::move(entries))}; }
  Value name_space(Entries entries) {
    return {.kind = Kind::kNamespace, .entries = keep(std::move(entries))};
  }
  Value function(std::string name, std::function<Value(const Arguments&)> call);
  Value loop(const Loop& loop);
  Value undefined(std::string name);  // `name` is used in messages

  // Counts one level of nesting during its lifetime. Throws Error beyond the limit.
  class NestingGuard {
   public:
    explicit NestingGuard(Heap& heap);
    ~NestingGuard() { --heap_.depth_; }
    NestingGuard(const NestingGuard&) = delete;
    NestingGuard& operator=(const NestingGuard&) = delete;

   private:
    Heap& heap_;
  };

 private:
  Items* keep(Items items);
  Entries* keep(Entries entries);

  Limits limits_;
  uint64_t steps_ = 0, bytes_ = 0;
  int depth_ = 0;
  std::deque<String> strings_;
  std::deque<Items> items_;
  std::deque<Entries> entries_;
  std::deque<Function> functions_;
  std::deque<Loop> loops_;
};

// The given ranges inside `part`, which lies in of.text, as offsets from the beginning of `part`.
std::vector<ByteRange> given_in(const String& of, std::string_view part);

// Builds a text within the limits of the heap.
class TextBuilder {
 public:
  explicit TextBuilder(Heap& heap) : heap_(&heap) {}

  void add(std::string_view text, bool given = false);
  void add(const String& of, std::string_view part);  // `part` lies in of.text
  void add(const String& text) { add(text, text.text); }

  Value value() { return heap_->string(std::move(text_), std::move(given_)); }
  std::string take_text() { return std::move(text_); }
  std::vector<ByteRange> take_given() { return std::move(given_); }

 private:
  Heap* heap_;
  std::string text_;
  std::vector<ByteRange> given_;
};

// Calls f(span, given) for each span of a text, in order; `given` says whether it comes from
// the context.
template <class F>
void for_each_span(const String& text, F f) {
  const std::string_view all = text.text;
  size_t done = 0;
  for (const ByteRange& range : text.given) {
    if (done < range.begin) f(all.substr(done, range.begin - done), false);
    f(all.substr(range.begin, range.end - range.begin), true);
    done = range.end;
  }
  if (done < all.size()) f(all.substr(done), false);
}

}  // namespace tandem::jinja
