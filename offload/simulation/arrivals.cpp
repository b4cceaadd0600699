#include "offload/simulation/arrivals.h"

#include <algorithm>
#include <deque>
#include <numeric>
#include <queue>
#include <random>

#include "core/check.h"

namespace tandem {
namespace {

// A request at one replica.
struct SimulatedRequest {
  int request;
  int n_prompt;           // tokens of the prompt that are still to be computed
  int n_output;           // tokens of the answer that are still to come
  double last_token = 0;  // when the last token came
};

struct Replica {
  const ServerGroup* group;
  int server;                            // its number, whose replicas share a network
  std::deque<SimulatedRequest> waiting;  // whose prompts are not computed, oldest first
  std::vector<SimulatedRequest> decoding;
  std::vector<int> pieces;  // tokens of the first waiting prompts in the current step
  int n_decoding = 0;       // sequences in the current step
  bool busy = false;
  int n_requests = 0;  // that were sent here and have not ended
};

class ArrivalSimulator {
 public:
  ArrivalSimulator(const ServerSystem& s, const std::vector<double>& arrivals)
      : s_(s), arrivals_(arrivals), first_counted_(arrivals[arrivals.size() / 10]) {
    int server = 0;
    for (const ServerGroup& g : s.groups)
      for (int i = 0; i < g.n_servers; ++i, ++server)
        for (int replica = 0; replica < g.n_replicas; ++replica)
          replicas_.push_back({&g, server, {}, {}, {}, 0, false, 0});
    network_free_.assign(server, 0);
    answers_of_.assign(arrivals.size(), 0);
    run_.first_token_seconds.assign(arrivals.size(), 0);
  }

  SimulatedAnswers run() {
    for (size_t i = 0; i < arrivals_.size(); ++i)
      events_.push({arrivals_[i], What::kArrives, static_cast<int>(i)});
    while (!events_.empty()) {
      const Event e = events_.top();
      events_.pop();
      now_ = e.time;
      if (e.what == What::kArrives) arrives(e.index);
      if (e.what == What::kStepEnds) step_ends(replicas_[e.index]);
      if (e.what == What::kKeysCame) keys_came(e.index);
    }
    run_.seconds = now_;
    std::sort(run_.gaps.begin(), run_.gaps.end());
    const double seconds = arrivals_.back() - first_counted_;
    run_.tokens_per_second = seconds > 0 ? static_cast<double>(n_counted_) / seconds : 0;
    return std::move(run_);
  }

 private:
  enum class What { kStepEnds, kKeysCame, kArrives };
  struct Event {
    double time;
    What what;
    int index;  // of the replica or request
    bool operator<(const Event& other) const { return time > other.time; }  // the first is on top
  };

  // The request goes to the server that answers, as `tandem route` chooses: where the fewest
  // requests are, in proportion to the servers' speeds.
  void arrives(int request) {
    const auto load = [&](const Replica& r) {
      return (1 + r.n_requests) * (*r.group->step)(1 + r.n_requests, 0);
    };
    const ServerRole answers = s_.splits() ? ServerRole::kDecode : ServerRole::kBoth;
    Replica& replica = least(answers, load);
    ++replica.n_requests;
    answers_of_[request] = index_of(replica);
    if (!s_.splits()) {
      replica.waiting.push_back({request, s_.prompt_tokens, s_.output_tokens});
      begin_step(replica);
      return;
    }
    // The prefill server that has the fewest tokens to compute.
    Replica& prefill = least(ServerRole::kPrefill, [&](const Replica& r) {
      double tokens = s_.paged_tokens();
      for (const SimulatedRequest& q : r.waiting) tokens += q.n_prompt;
      return tokens * (*r.group->step)(0, r.group->chunk_tokens) / r.group->chunk_tokens;
    });
    prefill.waiting.push_back({request, s_.paged_tokens(), 0});
    begin_step(prefill);
  }

  void keys_came(int request) {
    Replica& replica = replicas_[answers_of_[request]];
    replica.waiting.push_back({request, s_.prompt_tokens - s_.paged_tokens(), s_.output_tokens});
    begin_step(replica);
  }

  // The next token of every sequence, then pieces of prompts, oldest first.
  void begin_step(Replica& r) {
    if (r.busy) return;
    r.n_decoding = static_cast<int>(r.decoding.size());
    int room = r.group->chunk_tokens - r.n_decoding;
    int admitted = r.group->most_sequences - r.n_decoding;
    r.pieces.clear();
    for (const SimulatedRequest& q : r.waiting) {
      if (room <= 0 || admitted-- <= 0) break;
      r.pieces.push_back(std::min(room, q.n_prompt));
      room -= r.pieces.back();
    }
    const int n_prompt = std::accumulate(r.pieces.begin(), r.pieces.end(), 0);
    if (r.n_decoding + n_prompt == 0) return;
    r.busy = true;
    events_.push({now_ + (*r.group->step)(r.n_decoding, n_prompt), What::kStepEnds, index_of(r)});
  }

  void step_ends(Replica& r) {
    r.busy = false;
    for (SimulatedRequest& q : r.decoding) token(q);
    for (size_t i = 0; i < r.pieces.size(); ++i) {
      SimulatedRequest& q = r.waiting[i];
      q.n_prompt -= r.pieces[i];
      if (r.group->role == ServerRole::kPrefill) send(r, q, r.pieces[i]);
    }
    while (!r.waiting.empty() && r.waiting.front().n_prompt == 0) {
      SimulatedRequest q = r.waiting.front();
      r.waiting.pop_front();
      if (r.group->role == ServerRole::kPrefill) continue;
      run_.first_token_seconds[q.request] = now_ - arrivals_[q.request];
      count(q);
      r.decoding.push_back(q);
    }
    r.n_requests -= static_cast<int>(
        std::erase_if(r.decoding, [](const SimulatedRequest& q) { return q.n_output == 0; }));
    begin_step(r);
  }

  void token(SimulatedRequest& q) {
    run_.gaps.push_back(now_ - q.last_token);
    count(q);
  }
  void count(SimulatedRequest& q) {
    q.last_token = now_;
    --q.n_output;
    if (now_ > first_counted_ && now_ <= arrivals_.back()) ++n_counted_;
  }

  // Keys of a chunk, one chunk at a time on either server's network.
  void send(const Replica& from, const SimulatedRequest& q, int n_tokens) {
    double& sender = network_free_[from.server];
    double& receiver = network_free_[replicas_[answers_of_[q.request]].server];
    const double end = std::max({now_, sender, receiver}) +
                       n_tokens * s_.kv_bytes_per_token / s_.network.bytes_per_second;
    sender = receiver = end;
    if (q.n_prompt == 0)
      events_.push({end + 2 * s_.network.latency_seconds, What::kKeysCame, q.request});
  }

  template <typename Load>
  Replica& least(ServerRole role, const Load& load) {
    Replica* best = nullptr;
    double least = 0;
    for (size_t i = 0; i < replicas_.size(); ++i) {  // among equals, one after the other
      Replica& r = replicas_[(next_ + i) % replicas_.size()];
      if (r.group->role != role) continue;
      const double of_this = load(r);
      if (!best || of_this < least) best = &r, least = of_this;
    }
    next_ = index_of(*best) + 1;
    return *best;
  }
  int index_of(const Replica& r) const { return static_cast<int>(&r - replicas_.data()); }

  const ServerSystem& s_;
  const std::vector<double>& arrivals_;
  std::vector<Replica> replicas_;
  std::vector<double> network_free_;  // by server: when it has sent or received all
  std::vector<int> answers_of_;       // by request: the replica
  std::priority_queue<Event> events_;
  size_t next_ = 0;
  double now_ = 0;
  const double first_counted_;  // after the first tenth of the requests
  int64_t n_counted_ = 0;       // tokens from then until the last request arrives
  SimulatedAnswers run_;
};

}  // namespace

std::vector<double> poisson_arrivals(double requests_per_second, int n, uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::exponential_distribution<double> gap(requests_per_second);
  std::vector<double> times(n);
  double now = 0;
  for (double& time : times) time = now += gap(rng);
  return times;
}

SimulatedAnswers simulate_arrivals(const ServerSystem& s, const std::vector<double>& arrivals) {
  constexpr int64_t kMostTokens = 100'000'000;
  require(!arrivals.empty(), "no requests: nothing to simulate");
  const int64_t tokens = std::ssize(arrivals) * (int64_t{s.prompt_tokens} + s.output_tokens);
  require(tokens <= kMostTokens, "{} tokens of requests: more than {} are not simulated", tokens,
          kMostTokens);
  return ArrivalSimulator(s, arrivals).run();
}

double percentile(const std::vector<double>& sorted, double part) {
  if (sorted.empty()) return 0;
  return sorted[static_cast<size_t>(part * static_cast<double>(sorted.size() - 1))];
}

ServerSpeed simulated_speed(const ServerSystem& s, const ServerSpeed& predicted, uint64_t seed) {
  // So many that the servers are in their usual state for most of them.
  constexpr int kLeast = 200, kMost = 2000, kMostTokens = 2'000'000;
  const int n = std::clamp(kMostTokens / (s.prompt_tokens / 64 + s.output_tokens), kLeast, kMost);
  const SimulatedAnswers run =
      simulate_arrivals(s, poisson_arrivals(predicted.requests_per_second, n, seed));
  const auto mean = [](const std::vector<double>& values) {
    return values.empty() ? 0
                          : std::accumulate(values.begin(), values.end(), 0.0) /
                                static_cast<double>(values.size());
  };
  // The first tenth of the requests finds servers that are idle.
  std::vector<double> first(run.first_token_seconds.begin() + n / 10,
                            run.first_token_seconds.end());
  std::sort(first.begin(), first.end());
  ServerSpeed speed = {.sustained = predicted.sustained,
                       .requests_per_second = predicted.requests_per_second};
  speed.tokens_per_second = run.tokens_per_second;
  speed.first_token_seconds = mean(first);
  speed.p99_first_token_seconds = percentile(first, 0.99);
  speed.gap_seconds = mean(run.gaps);
  speed.p50_gap_seconds = percentile(run.gaps, 0.5);
  speed.p99_gap_seconds = percentile(run.gaps, 0.99);
  speed.request_seconds = speed.first_token_seconds + (s.output_tokens - 1) * speed.gap_seconds;
  speed.sequences = speed.requests_per_second * (s.output_tokens - 1) * speed.gap_seconds;
  return speed;
}

}  // namespace tandem
