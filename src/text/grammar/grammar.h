// A context-free grammar over bytes. Rules are graphs of nodes whose edges read a byte, read an
// added token, call a rule or read nothing (epsilon edges). Built once, immutable after finish().
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

  void add_bytes(Node from, uint8_t first, uint8_t last, Node to);
  void add_byte(Node from, char c, Node to);
  void add_token(Node from, int32_t id, Node to);
  void add_call(Node from, Rule rule, Node to);
  void add_epsilon(Node from, Node to);
  // These add the node that follows a text, a call or a byte, and return it.
  Node add_text(Node from, std::string_view text);
  void add_text(Node from, std::string_view text, Node to) {
    add_epsilon(add_text(from, text), to);
  }
  Node add_call(Node from, Rule rule);
  Node add_byte(Node from, char c);

  // The reason to give in the Error of finish() if no text matches `rule`.
  void explain_if_empty(Rule rule, std::string why) { reasons_.emplace_back(rule, std::move(why)); }

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
    Node return_to;
  };
  // The epsilon closure of a node, what is reachable without reading: nodes that read, calls, the
  // end of the rule.
  struct Closure {
    std::vector<Node> readers;
    std::vector<Call> calls;
    bool ends = false;
  };

  Rule root() const { return root_; }
  int n_nodes() const { return static_cast<int>(nodes_.size()); }
  int n_rules() const { return static_cast<int>(rules_.size()); }
  const std::vector<ByteEdge>& byte_edges(Node node) const { return nodes_[node].bytes; }
  const std::vector<TokenEdge>& token_edges(Node node) const { return nodes_[node].tokens; }
  const Closure& closure(Node node) const { return closures_[node]; }
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
    std::vector<Node> epsilons;
  };

  std::vector<bool> productive_nodes() const;
  void remove_dead_ends();
  void compute_closures();
  void order_rules();

  std::vector<NodeEdges> nodes_;
  std::vector<RuleNodes> rules_;
  std::vector<bool> is_end_;  // [node]
  std::vector<Closure> closures_;
  std::vector<int> call_order_;  // [rule]
  std::vector<std::pair<Rule, std::string>> reasons_;
  Rule root_ = -1;
};

}  // namespace tandem
