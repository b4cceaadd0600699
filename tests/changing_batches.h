// Random steps of sequences that start with a prompt, continue in changing batch compositions, and
// end: on two devices that choose their own tokens, or on two that must give the same bits.
#pragma once
#include <functional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "tests/conversations.h"
#include "text/chat_format.h"

namespace tandem::test {

struct ChangingBatches {
  unsigned seed;
  int n_sequences, n_steps;
  int end;     // length above which a sequence starts again
  int out_of;  // a sequence is left out of one step in `out_of`
  std::function<std::vector<int32_t>(std::mt19937&)> prompt;
  std::vector<int32_t> last_tokens = {};  // tokens that end a sequence
};

// Statistics of comparing rows of logits, which should be within `bound` of the largest logit.
struct Followed {
  int n_rows = 0, n_decoded = 0;  // n_decoded: rows of steps with one token
  int n_far = 0;                  // rows beyond the bound, after a near tie of experts
  int n_near = 0;  // rows whose greedy tokens differ and whose logits agree within the bound
};

// Greedy decoding on both devices. A sequence starts again where the tokens differ or the logits
// are beyond the bound.
Followed follow(Conversations& cpu, Conversations& gpu, const ChangingBatches& of,
                double bound = 2e-2);

// 1 to 20 random tokens.
std::vector<int32_t> random_prompt(std::mt19937& rng, int vocab);

// Prompts such as "What is 17 + 345?" in the model's chat format.
class Sums {
 public:
  explicit Sums(const std::string& directory);
  std::vector<int32_t> operator()(std::mt19937& rng) const;
  const std::vector<int32_t>& last_tokens() const { return tokenizer_.stop_ids(); }

 private:
  const Tokenizer tokenizer_;
  const ChatFormat format_;
};

void expect_same_bits(const std::vector<std::vector<float>>& a,
                      const std::vector<std::vector<float>>& b);

// Steps with random tokens, across a page boundary. Returns the numbers of sequences of the pure
// decode steps.
std::set<size_t> expect_same_steps(Conversations& a, Conversations& b, int n_sequences, int n_steps,
                                   unsigned seed);

}  // namespace tandem::test
