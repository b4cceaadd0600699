#include "text/grammar/repetition.h"

namespace tandem {

Repetition::Repetition(Grammar& g, const AddPart& one, const AddPart& close)
    : exactly_{}, at_most_{}, any_(g.add_rule()) {
  const Grammar::Rule exactly = g.add_rule(), at_most = g.add_rule();
  Grammar::Node node = g.start(exactly);
  for (int left = kBlock; left > 0; --left) {
    exactly_[left] = left == kBlock ? exactly : g.add_rule_within(exactly, node);
    const Grammar::Node next = left == 1 ? g.end(exactly) : g.add_node();
    one(node, next);
    node = next;
  }
  node = g.start(at_most);
  for (int left = kBlock - 1; left >= 0; --left) {
    at_most_[left] = left == kBlock - 1 ? at_most : g.add_rule_within(at_most, node);
    close(node, g.end(at_most));
    if (left == 0) break;
    const Grammar::Node next = g.add_node();
    one(node, next);
    node = next;
  }
  const Grammar::Node loop = g.add_node();
  g.add_epsilon(g.start(any_), loop);
  one(loop, loop);
  close(loop, g.end(any_));
}

void Repetition::add(Grammar& g, Grammar::Node from, Grammar::Node to, int min, int max) const {
  const int more = max - min;
  for (; min >= kBlock; min -= kBlock) from = g.add_call(from, exactly_[kBlock]);
  if (min > 0) from = g.add_call(from, exactly_[min]);
  if (max == kNoLimit) return g.add_call(from, any_, to);
  int left = more;
  for (; left >= kBlock; left -= kBlock) {
    g.add_call(from, at_most_[kBlock - 1], to);
    from = g.add_call(from, exactly_[kBlock]);
  }
  g.add_call(from, at_most_[left], to);
}

}  // namespace tandem
