// Reads a server's answer line by line and takes its times, exactly as sglang.benchmark.serving
// 0.5.23 does: what breaks that client is an error here.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

enum class ServingApi { kCompletions, kChat, kGenerate };  // OpenAI's two, SGLang's own

struct ServingOutput {
  bool success = false;
  bool interrupted = false;      // by the person in front: neither success nor failure
  std::string text, error;       // error: empty or why there is no success
  double latency = 0;            // seconds from before connecting to the last line
  double ttft = 0;               // to the first text; 0: there was none
  std::vector<double> itls;      // between texts, seconds
  int prompt_tokens = 0;         // as asked
  int server_prompt_tokens = 0;  // as the server says; 0: it does not say
  int output_tokens = 0;         // as the server says, else as asked
};

class AnswerReader {
 public:
  // `output` holds the tokens asked for and is filled.
  AnswerReader(ServingApi api, bool streams, ServingOutput& output)
      : api_(api), streams_(streams), output_(output) {}

  // One line of the body without its end, `seconds` after the request began. Throws Error for what
  // cannot be read.
  void line(std::string_view line, double seconds);
  // The body is complete. Throws Error when it was empty.
  void finish();

 private:
  void completion(std::string_view data, double seconds);
  void chat(std::string_view data, double seconds);
  void generate(std::string_view data, double seconds);
  void take_output_tokens(const nlohmann::json& event);
  void take_prompt_tokens(const nlohmann::json& event, const char* name);
  void count_gap(double seconds, int n_tokens = 1);

  const ServingApi api_;
  const bool streams_;
  ServingOutput& output_;
  double last_ = 0;
  int counted_tokens_ = 0;  // of /generate
  bool any_ = false;
};

}  // namespace tandem
