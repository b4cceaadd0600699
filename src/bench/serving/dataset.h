// The requests of a serving benchmark: the same prompts, lengths and order as
// sglang.benchmark.serving 0.5.23 draws with the same seed.
#pragma once
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bench/serving/python_random.h"
#include "text/tokenizer.h"

namespace tandem {

struct ServingRequest {
  std::string prompt;
  std::vector<int32_t> ids;  // used instead of the prompt when tokens are sent
  // As counted in the report; the server may tokenize the text differently.
  int prompt_tokens;
  int output_tokens;
};

struct DatasetOptions {
  std::string name = "sharegpt";  // sharegpt, random, random-ids
  std::string path;               // a ShareGPT file; random-ids needs none
  int n_prompts = 1000;
  int input_tokens = 1024, output_tokens = 1024;  // maxima for random and random-ids
  double range_ratio = 0;                         // minimum as a fraction of the maximum
  std::optional<int> sharegpt_output_tokens;      // replaces the length of the second turn
  std::optional<int> sharegpt_context;            // longer prompts and answers are skipped
  std::string prompt_suffix;                      // for sharegpt
  bool sends_ids = false;
};

// `n_base_tokens`: size of the vocabulary without added tokens. Returns fewer than n_prompts
// requests where the file has fewer. Throws Error.
std::vector<ServingRequest> make_dataset(const DatasetOptions& options, const Tokenizer& tokenizer,
                                         int n_base_tokens, PythonRandom& python,
                                         NumpyRandom& numpy);

// Size of the checkpoint's vocabulary without added tokens, like transformers' `vocab_size`.
int base_tokens(const std::string& directory, const Tokenizer& tokenizer);

// The first two turns of every conversation of a ShareGPT file that has two, in file order. The
// file is a JSON list of {"conversations": [{"value": text}, ..]}; the key may also be
// "conversation". Throws Error naming the file.
std::vector<std::pair<std::string, std::string>> read_sharegpt(const std::string& path);

}  // namespace tandem
