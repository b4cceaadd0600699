// Reads a server's answer line by line and measures its times exactly like sglang.benchmark.serving
// 0.5.23: what breaks that client is an error here.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

enum class ServingApi { kCompletions, kChat, kGenerate };  // OpenAI's two, and SGLang's own

struct ServingOutput {
  bool success = false;
  bool interrupted = false;      // by the user: neither success nor failure
  std::string text, error;       // error: why there is no success, or empty
  double latency = 0;            // seconds from before connecting to the last line
  double ttft = 0;               // seconds to the first text; 0: none
  std::vector<double> itls;      // seconds between texts
  int prompt_tokens = 0;         // as requested
  int server_prompt_tokens = 0;  // as reported by the server; 0: not reported
  int output_tokens = 0;         // as reported by the server, else as requested
};

class AnswerReader {
 public:
  // `output` holds the requested tokens and receives the results.
  AnswerReader(ServingApi api, bool streams, ServingOutput& output)
      : api_(api), streams_(streams), output_(output) {}

  // Takes one line of the body without its line end, `seconds` after the request began. Throws
  // Error for malformed lines.
  void line(std::string_view line, double seconds);
  // Called when the body is complete. Throws Error when it was empty.
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
  int counted_tokens_ = 0;  // for /generate
  bool any_ = false;
};

}  // namespace tandem
