#include "text/grammar/grammar.h"

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
  require(nodes_.size() < kMaxNodes, "too large: more than {} states", kMaxNodes);
  nodes_.emplace_back();
  is_end_.push_back(false);
  return static_cast<Node>(nodes_.size()) - 1;
}

void Grammar::add_bytes(Node from, uint8_t first, uint8_t last, Node to) {
  nodes_[from].bytes.push_back({first, last, to});
}

void Grammar::add_byte(Node from, char c, Node to) {
  add_bytes(from, static_cast<uint8_t>(c), static_cast<uint8_t>(c), to);
}

void Grammar::add_token(Node from, int32_t id, Node to) { nodes_[from].tokens.push_back({id, to}); }

void Grammar::add_call(Node from, Rule rule, Node to) { nodes_[from].calls.push_back({rule, to}); }

void Grammar::add_epsilon(Node from, Node to) { nodes_[from].epsilons.push_back(to); }

Grammar::Node Grammar::add_text(Node from, std::string_view text) {
  for (const char c : text) from = add_byte(from, c);
  return from;
}

Grammar::Node Grammar::add_call(Node from, Rule rule) {
  const Node to = add_node();
  add_call(from, rule, to);
  return to;
}

Grammar::Node Grammar::add_byte(Node from, char c) {
  const Node to = add_node();
  add_byte(from, c, to);
  return to;
}

void Grammar::finish(Rule root) {
  root_ = root;
  remove_dead_ends();
  compute_closures();
  for (const RuleNodes& rule : rules_)
    require(!closures_[rule.start].ends, "a rule matches the empty text");
  order_rules();
}

void Grammar::compute_closures() {
  closures_.resize(nodes_.size());
  std::vector<Node> seen_from(nodes_.size(), -1), seen;
  size_t n_reachable = 0;
  for (Node from = 0; from < n_nodes(); ++from) {
    Closure& closure = closures_[from];
    seen = {from};
    seen_from[from] = from;
    for (size_t i = 0; i < seen.size(); ++i) {
      const NodeEdges& edges = nodes_[seen[i]];
      if (!edges.bytes.empty() || !edges.tokens.empty()) closure.readers.push_back(seen[i]);
      closure.calls.insert(closure.calls.end(), edges.calls.begin(), edges.calls.end());
      closure.ends = closure.ends || is_end_[seen[i]];
      for (const Node to : edges.epsilons)
        if (std::exchange(seen_from[to], from) != from) seen.push_back(to);
    }
    n_reachable += seen.size();
    require(n_reachable <= kMaxReachable, "too large: too many optional parts");
  }
}

void Grammar::order_rules() {
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
      const std::vector<Call>& calls = closures_[rules_[rule].start].calls;
      if (next == calls.size()) {
        marks[rule] = Mark::kDone;
        call_order_[rule] = --order;
        open.pop_back();
        continue;
      }
      const Rule called = calls[next++].rule;
      require(marks[called] != Mark::kOpen, "a rule consists only of itself");
      if (marks[called] == Mark::kNew) enter(called);
    }
  }
}

// Removes edges to nodes from which no text reaches the end; there a model would never finish.
void Grammar::remove_dead_ends() {
  const std::vector<bool> ends = productive_nodes();
  if (!ends[start(root_)]) {
    // The last empty rule is the innermost one, because of which the others are empty.
    std::string why = "every matching value would have to contain itself";
    for (const auto& [rule, reason] : reasons_)
      if (!ends[start(rule)]) why = reason;
    fail("no value matches: {}", why);
  }
  for (NodeEdges& node : nodes_) {
    std::erase_if(node.bytes, [&](const ByteEdge& edge) { return !ends[edge.to]; });
    std::erase_if(node.tokens, [&](const TokenEdge& edge) { return !ends[edge.to]; });
    std::erase_if(node.epsilons, [&](Node to) { return !ends[to]; });
    std::erase_if(node.calls, [&](const Call& call) {
      return !ends[call.return_to] || !ends[start(call.rule)];
    });
  }
}

// [node] Whether some text leads from the node to the end of its rule.
std::vector<bool> Grammar::productive_nodes() const {
  std::vector<std::vector<Node>> before(nodes_.size());              // without calls
  std::vector<std::vector<Call>> calls_returning_to(nodes_.size());  // .return_to: the caller
  std::vector<std::vector<Call>> calls_of(rules_.size());            // .rule: the caller
  std::vector<std::vector<Rule>> started_by(nodes_.size());
  for (Node node = 0; node < n_nodes(); ++node) {
    const NodeEdges& edges = nodes_[node];
    for (const ByteEdge& edge : edges.bytes) before[edge.to].push_back(node);
    for (const TokenEdge& edge : edges.tokens) before[edge.to].push_back(node);
    for (const Node to : edges.epsilons) before[to].push_back(node);
    for (const Call& call : edges.calls) {
      calls_returning_to[call.return_to].push_back({call.rule, node});
      calls_of[call.rule].push_back({node, call.return_to});
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
    for (const Call& call : calls_returning_to[node])
      if (ends[rules_[call.rule].start]) find(call.return_to);
    for (const Rule rule : started_by[node])
      for (const Call& call : calls_of[rule])
        if (ends[call.return_to]) find(call.rule);
  }
  return ends;
}

}  // namespace tandem
