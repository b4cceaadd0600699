#include <algorithm>
#include <map>

#include "core/check.h"
#include "text/grammar/schema_writer.h"

namespace tandem {
namespace {

using Json = SchemaJson;
using Node = Grammar::Node;
using Rule = Grammar::Rule;
using Schemas = SchemaWriter::Schemas;

constexpr int kMaxUnrolledItems = 2 * Repetition::kBlock;  // more items are written as a Repetition

class ArrayWriter {
 public:
  ArrayWriter(SchemaWriter& writer, Rule rule, const Constraints& constraints)
      : w_(writer), g_(writer.grammar), rule_(rule), constraints_(constraints) {
    min_ = largest_minimum(w_.document, constraints, "minItems");
    max_ = smallest_maximum(w_.document, constraints, "maxItems");
    for (const Json* schema : constraints.schemas) {
      const ItemSchemas items = item_schemas(*schema, location(*schema));
      if (items.first) n_first_ = std::max(n_first_, static_cast<int>(items.first->size()));
      const Json* unique = keyword(*schema, "uniqueItems");
      unique_ = unique_ || (unique && *unique == true);
      if (keyword(*schema, "contains")) add_contained(*schema);
    }
    for (int i = 0; i <= n_first_; ++i)
      if (has_false(schemas_of(i)) && (max_ == kNoLimit || max_ > i)) max_ = i;
    n_first_ = max_ == kNoLimit ? n_first_ : std::min(n_first_, max_);
  }

  void write() {
    const std::string& at = location(*constraints_.schemas.back());
    if (max_ != kNoLimit && min_ > max_)
      return g_.explain_if_empty(
          rule_, fmt::format("{}: no array has from {} to {} items", at, min_, max_));
    close_ = g_.add_node();
    g_.add_byte(close_, ']', g_.end(rule_));
    const Node open = add_optional_space(g_, w_.json, g_.add_byte(g_.start(rule_), '['));
    const bool may_repeat = max_ == kNoLimit || max_ > 1;
    if (unique_ && may_repeat) {
      require(contained_.empty(), "{}: \"uniqueItems\" beside \"contains\" is not supported", at);
      write_unique(open, at);
    } else if (!contained_.empty()) {
      write_with_contained(open);
    } else {
      write_items(open);
    }
  }

 private:
  struct Contained {
    const Json *schema, *excluded;  // excluded: the negation of `schema`, or null if not needed
    int min, max;
  };

  const std::string& location(const Json& schema) const { return w_.document.location(schema); }

  void add_contained(const Json& schema) {
    const std::string& at = location(schema);
    const int min = count_of(schema, at, "minContains", 1);
    const int max = count_of(schema, at, "maxContains", kMaxCount);
    if (min == 0 && max == kMaxCount) return;
    const Json& item = w_.document.part(schema, "contains");
    const Json* excluded = nullptr;
    if (max < kMaxCount)
      excluded = &w_.document.add_generated({{"not", {{"$ref", location(item)}}}}, at);
    contained_.push_back({&item, excluded, min, max == kMaxCount ? kNoLimit : max});
  }

  // The schemas that the i-th item must fit.
  Schemas schemas_of(int i) {
    Schemas schemas;
    for (const Json* schema : constraints_.schemas) {
      const ItemSchemas items = item_schemas(*schema, location(*schema));
      if (items.first && i < static_cast<int>(items.first->size())) {
        schemas.push_back(&w_.document.part(*schema, items.first_name, static_cast<size_t>(i)));
      } else if (items.others) {
        schemas.push_back(&w_.document.part(*schema, items.others_name));
      }
    }
    return schemas;
  }

  Node after_comma(Node item) {
    return add_optional_space(g_, w_.json, g_.add_byte(add_optional_space(g_, w_.json, item), ','));
  }

  // Writes the items with schemas of their own one by one, all others as a repetition.
  void write_items(Node node) {
    const int n_single = std::max(n_first_, 1);
    const Rule other = max_ == kNoLimit || max_ > n_first_ ? w_.rule_of(schemas_of(n_first_)) : -1;
    if (min_ == 0) g_.add_epsilon(node, close_);
    for (int i = 0; i < n_single && i != max_; ++i) {
      if (i > 0 && i >= min_) g_.add_epsilon(add_optional_space(g_, w_.json, node), close_);
      if (i > 0) node = after_comma(node);
      node = g_.add_call(node, i < n_first_ ? w_.rule_of(schemas_of(i)) : other);
    }
    if (max_ == 0) return;
    const int min = std::max(0, min_ - n_single);
    const int max = max_ == kNoLimit ? kNoLimit : std::max(0, max_ - n_single);
    const auto one = [&](Node from, Node to) { g_.add_call(after_comma(from), other, to); };
    const auto end = [&](Node from, Node to) {
      g_.add_byte(add_optional_space(g_, w_.json, from), ']', to);
    };
    if (std::max(min, max) > kMaxUnrolledItems)
      return Repetition(g_, one, end).add(g_, node, g_.end(rule_), min, max);
    for (int i = 0; i < std::max(min, max); ++i) {
      if (i >= min) end(node, g_.end(rule_));
      const Node next = g_.add_node();
      one(node, next);
      node = next;
    }
    if (max == kNoLimit) one(node, node);
    end(node, g_.end(rule_));
  }

  // Writes items such that each one either counts or does not count for each "contains".
  void write_with_contained(Node open) {
    using State = std::pair<int, std::vector<int>>;  // items, and the count of each "contains"
    const int most = max_ == kNoLimit ? std::max(n_first_, min_) : max_;
    std::map<State, Node> nodes;
    std::vector<State> pending;
    const auto node_of = [&](const State& state) {
      const auto [it, is_new] = nodes.try_emplace(state, -1);
      if (is_new) {
        it->second = g_.add_node();
        pending.push_back(state);
      }
      return it->second;
    };
    g_.add_epsilon(open, node_of({0, std::vector<int>(contained_.size(), 0)}));
    bool is_first = true;
    while (!pending.empty()) {
      const State state = pending.back();
      pending.pop_back();
      const int n = state.first;
      const std::vector<int>& counts = state.second;
      const Node node = nodes.at(state);
      bool enough = n >= min_;
      for (size_t k = 0; k < counts.size(); ++k) enough = enough && counts[k] >= contained_[k].min;
      if (enough) g_.add_epsilon(is_first ? node : add_optional_space(g_, w_.json, node), close_);
      if (n != max_) {
        const Node before = is_first ? node : after_comma(node);
        for_each_count(counts, [&](const std::vector<int>& next, const Schemas& counted) {
          Schemas schemas = schemas_of(n);
          schemas.insert(schemas.end(), counted.begin(), counted.end());
          // Even if the number of items does not matter, none differs from some: a comma is needed.
          const State to = {std::min(n + 1, std::max(most, 1)), next};
          g_.add_call(before, w_.rule_of(schemas), node_of(to));
        });
      }
      is_first = false;
    }
  }

  template <class Found>
  void for_each_count(const std::vector<int>& counts, Found found) {
    require(contained_.size() <= 4, "{}: more than 4 \"contains\" at once are not supported",
            location(*constraints_.schemas.back()));
    for (unsigned bits = 0; bits < 1U << counts.size(); ++bits) {
      std::vector<int> next = counts;
      Schemas schemas;
      bool possible = true;
      for (size_t k = 0; k < counts.size(); ++k) {
        const Contained& c = contained_[k];
        const bool is_counted = (bits >> k & 1) != 0;
        if (is_counted) {
          schemas.push_back(c.schema);
          possible = possible && counts[k] != c.max;
          next[k] = c.max == kNoLimit ? std::min(counts[k] + 1, c.min) : counts[k] + 1;
        } else if (c.excluded) {
          schemas.push_back(c.excluded);
        }
      }
      if (possible) found(next, schemas);
    }
  }

  // Writes the constants in their order, each at most once.
  void write_unique(Node open, const std::string& at) {
    Constraints constraints;
    for (const Json* schema : schemas_of(n_first_))
      w_.document.add_constraints(*schema, constraints);
    const auto constants = n_first_ == 0 ? w_.values.constants(constraints) : std::nullopt;
    require(constants.has_value(),
            "{}: \"uniqueItems\" is supported only where the items are constants, booleans or a "
            "few integers: other duplicates cannot be prevented",
            at);
    const auto n = static_cast<int>(constants->size());
    g_.explain_if_empty(
        rule_, fmt::format("{}: {} constants are fewer than {} different items", at, n, min_));
    const int most = max_ == kNoLimit ? n : std::min(n, max_);
    std::vector<Node> after(most + 1, -1);  // [items so far] the node after them
    after[0] = open;
    for (const Json& constant : *constants) {
      const std::string text = constant.dump();
      for (int count = most; count > 0; --count) {
        if (after[count - 1] < 0) continue;
        const Node before = count == 1 ? open : after_comma(after[count - 1]);
        const Node next = g_.add_node();
        g_.add_text(before, text, next);
        if (after[count] >= 0) g_.add_epsilon(after[count], next);
        after[count] = next;
      }
    }
    for (int count = min_; count <= most; ++count)
      if (after[count] >= 0)
        g_.add_epsilon(count == 0 ? open : add_optional_space(g_, w_.json, after[count]), close_);
  }

  SchemaWriter& w_;
  Grammar& g_;
  const Rule rule_;
  const Constraints& constraints_;
  int min_ = 0, max_ = kNoLimit;
  int n_first_ = 0;  // items with schemas of their own
  bool unique_ = false;
  std::vector<Contained> contained_;
  Node close_ = -1;
};

}  // namespace

void write_array(SchemaWriter& writer, Rule rule, const Constraints& constraints) {
  ArrayWriter(writer, rule, constraints).write();
}

}  // namespace tandem
