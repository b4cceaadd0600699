// What a serving benchmark asks: the same prompts, lengths and order as sglang.benchmark.serving
// 0.5.23 draws for the same seed.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "bench/serving/python_random.h"
#include "io/tokenizer.h"

namespace tandem {

struct ServingRequest {
  std::string prompt;
  std::vector<int32_t> ids;  // instead of the prompt, where it is sent as tokens
  int prompt_tokens;         // as the report counts them: the text may be split otherwise
  int output_tokens;
};

struct DatasetOptions {
  std::string name = "sharegpt";  // sharegpt, random, random-ids
  std::string path;               // of a ShareGPT file; random-ids needs none
  int n_prompts = 1000;
  int input_tokens = 1024, output_tokens = 1024;  // of random and random-ids: the most
  double range_ratio = 0;                         // the least, as a part of the most
  std::optional<int> sharegpt_output_tokens;      // instead of the second turn's
  std::optional<int> sharegpt_context;            // prompts and answers above it are left out
  std::string prompt_suffix;                      // of sharegpt
  bool sends_ids = false;
};

// `n_base_tokens`: tokens that are not added ones. May return fewer than n_prompts where the file
// has fewer. Throws Error.
std::vector<ServingRequest> make_dataset(const DatasetOptions& options, const Tokenizer& tokenizer,
                                         int n_base_tokens, PythonRandom& python,
                                         NumpyRandom& numpy);

// Tokens of the checkpoint's own vocabulary, as transformers' `vocab_size` counts them.
int base_tokens(const std::string& directory, const Tokenizer& tokenizer);

}  // namespace tandem
