// A context-free grammar over bytes. Rules are graphs of nodes whose edges read a byte, read an
// added token, call a rule or read nothing. Built once, immutable after finish().
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tandem {

class Grammar {
 public:
  using Node = int32_t;
  using Rule = int32_t;

  // A new rule, which must read at least one byte or token.
  Rule add_rule();
  // A rule from node `start` of another rule to that rule's end; both rules share the nodes.
  Rule add_rule_within(Rule rule, Node start);
  Node start(Rule rule) const { return rules_[rule].start; }
  Node end(Rule rule) const { return rules_[rule].end; }
  // Throws Error when the grammar has too many nodes.
  Node add_node();

  void bytes(Node from, uint8_t first, uint8_t last, Node to);
  void token(Node from, int32_t id, Node to);
  void call(Node from, Rule rule, Node to);
  void skip(Node from, Node to);
  // These add nodes that read a text, call a rule or read a byte, and return the node after it.
  Node text(Node from, std::string_view text);
  void text(Node from, std::string_view text, Node to) { skip(this->text(from, text), to); }
  Node called(Node from, Rule rule);
  Node byte(Node from, char c);

  // The reason to give in the Error of finish() if no text matches `rule`.
  void explain(Rule rule, std::string why) { reasons_.emplace_back(rule, std::move(why)); }

  // Makes `root` the rule of the whole text and removes edges that lead to no complete text. Throws
  // Error when a rule may call itself before reading anything, when a rule may read nothing, or
  // when no text matches.
  void finish(Rule root);

  // Everything below is available after finish().
  struct ByteEdge {
    uint8_t first, last;
    Node to;
  };
  struct TokenEdge {
    int32_t id;
    Node to;
  };
  struct Call {
    Rule rule;
    Node back;
  };
  // What is reachable from a node without reading: nodes that read, calls, the end of the rule.
  struct Reach {
    std::vector<Node> readers;
    std::vector<Call> calls;
    bool ends = false;
  };

  Rule root() const { return root_; }
  int n_nodes() const { return static_cast<int>(nodes_.size()); }
  int n_rules() const { return static_cast<int>(rules_.size()); }
  const std::vector<ByteEdge>& byte_edges(Node node) const { return nodes_[node].bytes; }
  const std::vector<TokenEdge>& token_edges(Node node) const { return nodes_[node].tokens; }
  const Reach& reach(Node node) const { return reach_[node]; }
  // If a rule may call another one before reading, the called rule has the larger number.
  int call_order(Rule rule) const { return call_order_[rule]; }

 private:
  struct RuleNodes {
    Node start, end;
  };
  struct NodeEdges {
    std::vector<ByteEdge> bytes;
    std::vector<TokenEdge> tokens;
    std::vector<Call> calls;
    std::vector<Node> skips;
  };

  std::vector<bool> nodes_that_end() const;
  void leave_out_dead_ends();
  void find_reach();
  void sort_rules();

  std::vector<NodeEdges> nodes_;
  std::vector<RuleNodes> rules_;
  std::vector<bool> is_end_;  // [node]
  std::vector<Reach> reach_;
  std::vector<int> call_order_;  // [rule]
  std::vector<std::pair<Rule, std::string>> reasons_;
  Rule root_ = -1;
};

}  // namespace tandem
