// How fast servers answer requests that arrive at random, in closed form: servers that compute
// prompts and answers, or some that compute prompts for the others (docs/prefill_decode.md). The
// simulation of offload/simulation/arrivals.h answers the same question request by request. Pure.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "core/machine.h"

namespace tandem {

// Prompts can be computed by another server than the answers.
enum class ServerRole { kBoth, kPrefill, kDecode };
const char* name_of(ServerRole role);  // "both", "prefill" or "decode"

// Seconds of a step of one replica: the next tokens of some sequences, and some tokens of prompts.
// Steps between the priced ones are interpolated, but not across `jump`, the least number of tokens
// that are computed in another way; 0: there is none.
class StepTable {
 public:
  using Price = std::function<double(int sequences, int prompt_tokens)>;
  explicit StepTable(Price price, int jump = 0) : price_(std::move(price)), jump_(jump) {}
  double operator()(double sequences, double prompt_tokens);

 private:
  double priced(int sequences, int prompt_tokens);

  const Price price_;
  const int jump_;
  std::map<std::pair<int, int>, double> known_;
};

// Servers that are alike.
struct ServerGroup {
  ServerRole role = ServerRole::kBoth;
  int n_servers = 1;
  int n_replicas = 1;  // of the backbone in each server; each has sequences of its own
  std::shared_ptr<StepTable> step;
  int chunk_tokens = 512;    // of a step
  int most_sequences = 256;  // of a replica

  int queues() const { return n_servers * n_replicas; }
};

struct ServerSystem {
  std::vector<ServerGroup> groups;  // all with kBoth, or some with each of the other roles
  int prompt_tokens = 1, output_tokens = 1;
  double kv_bytes_per_token = 0;
  Link network;  // of a prefill server, to a decode server

  bool splits() const { return groups.front().role != ServerRole::kBoth; }
  // The tokens of a prompt whose keys travel: those of whole pages, without the last token.
  int paged_tokens() const;
};

// Percentiles are those of all requests, or of all gaps between two tokens of an answer.
struct ServerSpeed {
  bool sustained = false;  // false: requests arrive faster than they are answered
  double requests_per_second = 0, tokens_per_second = 0;  // tokens of answers
  double first_token_seconds = 0, p99_first_token_seconds = 0;
  double gap_seconds = 0, p50_gap_seconds = 0, p99_gap_seconds = 0;
  double request_seconds = 0;
  double sequences = 0;  // being decoded, of all servers
  double busy = 0;       // the share of time in which the busiest server computes prompts
  // What keys of a prompt take after its last chunk, and the share of time in which the busiest
  // network sends them.
  double keys_seconds = 0, network_busy = 0;
};

ServerSpeed speed_at(const ServerSystem& system, double requests_per_second);

// The highest rate that speed_at() says is sustained.
double most_requests_per_second(const ServerSystem& system);

struct ServerGoal {
  double requests_per_second = 0;  // 0: as many as `concurrency` says
  int concurrency = 1;  // requests on the way, on average; 0: as many as the bounds allow
  // Bounds, of which 0 is none: seconds that 99 of 100 first tokens and gaps do not exceed, and
  // tokens a second of a user.
  double first_token_seconds = 0, gap_seconds = 0, tokens_per_second_per_user = 0;
};
bool meets(const ServerGoal& goal, const ServerSpeed& speed);
// At the rate or, where it is not sustained, at nine tenths of what is. With neither rate nor
// concurrency: at the highest rate that meets the bounds, at most at those nine tenths.
ServerSpeed speed_for(const ServerSystem& system, const ServerGoal& goal);

}  // namespace tandem
