#include "text/grammar/grammar.h"

#include <algorithm>
#include <utility>

#include "core/check.h"

namespace tandem {
namespace {

constexpr size_t kMaxNodes = 100'000;
constexpr size_t kMaxReachable = 2'000'000;

}  // namespace

Grammar::Rule Grammar::add_rule() {
  const Node start = add_node(), end = add_node();
  is_end_[end] = true;
  rules_.push_back({start, end});
  return static_cast<Rule>(rules_.size()) - 1;
}

Grammar::Rule Grammar::add_rule_within(Rule rule, Node start) {
  rules_.push_back({start, end(rule)});
  return static_cast<Rule>(rules_.size()) - 1;
}

Grammar::Node Grammar::add_node() {
  require(nodes_.size() < kMaxNodes, "it is too large: more than {} states", kMaxNodes);
  nodes_.emplace_back();
  is_end_.push_back(false);
  return static_cast<Node>(nodes_.size()) - 1;
}

void Grammar::bytes(Node from, uint8_t first, uint8_t last, Node to) {
  nodes_[from].bytes.push_back({first, last, to});
}

void Grammar::token(Node from, int32_t id, Node to) { nodes_[from].tokens.push_back({id, to}); }

void Grammar::call(Node from, Rule rule, Node to) { nodes_[from].calls.push_back({rule, to}); }

void Grammar::skip(Node from, Node to) { nodes_[from].skips.push_back(to); }

Grammar::Node Grammar::text(Node from, std::string_view text) {
  for (const char c : text) from = byte(from, c);
  return from;
}

Grammar::Node Grammar::called(Node from, Rule rule) {
  const Node to = add_node();
  call(from, rule, to);
  return to;
}

Grammar::Node Grammar::byte(Node from, char c) {
  const Node to = add_node();
  bytes(from, static_cast<uint8_t>(c), static_cast<uint8_t>(c), to);
  return to;
}

void Grammar::finish(Rule root) {
  root_ = root;
  leave_out_dead_ends();
  find_reach();
  for (const RuleNodes& rule : rules_)
    require(!reach_[rule.start].ends, "a part of it may be empty");
  sort_rules();
}

void Grammar::find_reach() {
  reach_.resize(nodes_.size());
  std::vector<Node> seen_from(nodes_.size(), -1), seen;
  size_t n_reached = 0;
  for (Node from = 0; from < n_nodes(); ++from) {
    Reach& reach = reach_[from];
    seen = {from};
    seen_from[from] = from;
    for (size_t i = 0; i < seen.size(); ++i) {
      const NodeEdges& edges = nodes_[seen[i]];
      if (!edges.bytes.empty() || !edges.tokens.empty()) reach.readers.push_back(seen[i]);
      reach.calls.insert(reach.calls.end(), edges.calls.begin(), edges.calls.end());
      reach.ends = reach.ends || is_end_[seen[i]];
      for (const Node to : edges.skips)
        if (std::exchange(seen_from[to], from) != from) seen.push_back(to);
    }
    n_reached += seen.size();
    require(n_reached <= kMaxReachable, "it is too large: too many parts that may be left out");
  }
}

void Grammar::sort_rules() {
  enum class Mark : uint8_t { kNew, kOpen, kDone };
  struct Visit {
    Rule rule;
    size_t next;
  };
  std::vector<Mark> marks(rules_.size(), Mark::kNew);
  std::vector<Visit> open;
  int order = n_rules();
  call_order_.resize(rules_.size());
  const auto enter = [&](Rule rule) {
    marks[rule] = Mark::kOpen;
    open.push_back({rule, 0});
  };
  for (Rule first = 0; first < n_rules(); ++first) {
    if (marks[first] == Mark::kNew) enter(first);
    while (!open.empty()) {
      auto& [rule, next] = open.back();
      const std::vector<Call>& calls = reach_[rules_[rule].start].calls;
      if (next == calls.size()) {
        marks[rule] = Mark::kDone;
        call_order_[rule] = --order;
        open.pop_back();
        continue;
      }
      const Rule called = calls[next++].rule;
      require(marks[called] != Mark::kOpen, "a part of it is nothing but itself");
      if (marks[called] == Mark::kNew) enter(called);
    }
  }
}

// Removes edges to nodes from which no text reaches the end; there a model would never finish.
void Grammar::leave_out_dead_ends() {
  const std::vector<bool> ends = nodes_that_end();
  if (!ends[start(root_)]) {
    // The last empty rule is the innermost one, because of which the others are empty.
    std::string why = "what fits would have to hold itself";
    for (const auto& [rule, reason] : reasons_)
      if (!ends[start(rule)]) why = reason;
    fail("nothing fits it: {}", why);
  }
  for (NodeEdges& node : nodes_) {
    std::erase_if(node.bytes, [&](const ByteEdge& edge) { return !ends[edge.to]; });
    std::erase_if(node.tokens, [&](const TokenEdge& edge) { return !ends[edge.to]; });
    std::erase_if(node.skips, [&](Node to) { return !ends[to]; });
    std::erase_if(node.calls,
                  [&](const Call& call) { return !ends[call.back] || !ends[start(call.rule)]; });
  }
}

// [node] Whether some text leads from the node to the end of its rule.
std::vector<bool> Grammar::nodes_that_end() const {
  std::vector<std::vector<Node>> before(nodes_.size());         // without calls
  std::vector<std::vector<Call>> calls_back_to(nodes_.size());  // .back: the caller
  std::vector<std::vector<Call>> calls_of(rules_.size());       // .rule: the caller
  std::vector<std::vector<Rule>> started_by(nodes_.size());
  for (Node node = 0; node < n_nodes(); ++node) {
    const NodeEdges& edges = nodes_[node];
    for (const ByteEdge& edge : edges.bytes) before[edge.to].push_back(node);
    for (const TokenEdge& edge : edges.tokens) before[edge.to].push_back(node);
    for (const Node to : edges.skips) before[to].push_back(node);
    for (const Call& call : edges.calls) {
      calls_back_to[call.back].push_back({call.rule, node});
      calls_of[call.rule].push_back({node, call.back});
    }
  }
  for (Rule rule = 0; rule < n_rules(); ++rule) started_by[rules_[rule].start].push_back(rule);

  std::vector<bool> ends(nodes_.size());
  std::vector<Node> found;
  const auto find = [&](Node node) {
    if (!ends[node]) found.push_back(node);
    ends[node] = true;
  };
  for (const RuleNodes& rule : rules_) find(rule.end);
  while (!found.empty()) {
    const Node node = found.back();
    found.pop_back();
    for (const Node from : before[node]) find(from);
    for (const Call& call : calls_back_to[node])
      if (ends[rules_[call.rule].start]) find(call.back);
    for (const Rule rule : started_by[node])
      for (const Call& call : calls_of[rule])
        if (ends[call.back]) find(call.rule);
  }
  return ends;
}

}  // namespace tandem
