#include "offload/servers/server_speed.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "model/kv_layout.h"

namespace tandem {
namespace {

// What requests meet that are computed by one group of servers.
struct Queue {
  bool sustained = false;
  double share = 0;      // of the requests
  double sequences = 0;  // that a replica decodes, on average
  double met = 0;        // that a sequence meets there, with itself
  // A prompt is computed in some steps with as many of its tokens as there is room for, and in one
  // with the rest.
  double n_whole = 0, whole = 0, rest = 0;
  double busy = 0, prompt_seconds = 0;  // share of time with prompts; one prompt without waiting
  double current_seconds = 0;           // until the current step ends, on average
  double chance = 0, wait = 0;  // that other prompts come first, and how long they take then
  // Gaps between tokens: shares of those with a whole piece of a prompt and with the rest of one.
  double whole_share = 0, rest_share = 0;
  double gap = 0;  // mean
};

// Requests as one role sees them.
struct Stream {
  std::vector<ServerGroup> groups;
  int prompt_tokens, output_tokens;
};

// The streams of a system: of servers that do both, or of those with either role.
std::vector<Stream> streams_of(const ServerSystem& s);
std::vector<Queue> queues_at(const Stream& stream, double rate);
Queue queue_at(const ServerGroup& group, const Stream& stream, double rate);
std::vector<double> shares_at(const Stream& stream, double rate);
void add_first_tokens(const ServerSystem& s, const std::vector<std::vector<Queue>>& queues,
                      ServerSpeed& speed);
void add_gaps(const ServerSystem& s, const std::vector<Queue>& queues, ServerSpeed& speed);

// The largest value below `high` for which a condition holds that holds below it.
template <typename Holds>
double largest(double low, double high, const Holds& holds) {
  constexpr int kSteps = 30;
  for (int i = 0; i < kSteps; ++i) {
    const double middle = (low + high) / 2;
    (holds(middle) ? low : high) = middle;
  }
  return low;
}

}  // namespace

const char* name_of(ServerRole role) {
  constexpr const char* kNames[] = {"both", "prefill", "decode"};
  return kNames[static_cast<int>(role)];
}

int ServerSystem::paged_tokens() const {
  return (prompt_tokens - 1) / static_cast<int>(kPageSize) * static_cast<int>(kPageSize);
}

ServerSpeed speed_at(const ServerSystem& s, double rate) {
  ServerSpeed speed = {.sustained = true, .requests_per_second = rate};
  speed.tokens_per_second = rate * s.output_tokens;
  std::vector<std::vector<Queue>> queues;
  for (const Stream& stream : streams_of(s)) queues.push_back(queues_at(stream, rate));
  for (const std::vector<Queue>& of_role : queues)
    for (const Queue& q : of_role) {
      speed.sustained = speed.sustained && q.sustained;
      speed.busy = std::max(speed.busy, q.busy);
    }
  add_first_tokens(s, queues, speed);
  speed.sustained = speed.sustained && speed.network_busy < 1;
  if (s.output_tokens > 1 && speed.sustained) add_gaps(s, queues.back(), speed);
  speed.request_seconds = speed.first_token_seconds + (s.output_tokens - 1) * speed.gap_seconds;
  speed.sequences = rate * (s.output_tokens - 1) * speed.gap_seconds;
  return speed;
}

double most_requests_per_second(const ServerSystem& s) {
  double high = 1e-6;
  while (speed_at(s, high).sustained && high < 1e6) high *= 2;
  return largest(0, high, [&](double rate) { return speed_at(s, rate).sustained; });
}

bool meets(const ServerGoal& goal, const ServerSpeed& speed) {
  const auto within = [](double seconds, double bound) { return bound == 0 || seconds <= bound; };
  return speed.sustained && within(speed.p99_first_token_seconds, goal.first_token_seconds) &&
         within(speed.p99_gap_seconds, goal.gap_seconds) &&
         speed.gap_seconds * goal.tokens_per_second_per_user <= 1;
}

ServerSpeed speed_for(const ServerSystem& s, const ServerGoal& goal) {
  constexpr double kMostBusy = 0.9;
  if (goal.requests_per_second > 0) {
    ServerSpeed speed = speed_at(s, goal.requests_per_second);
    if (speed.sustained) return speed;
    speed = speed_at(s, kMostBusy * most_requests_per_second(s));
    speed.sustained = false;
    return speed;
  }
  const double most = most_requests_per_second(s);
  if (goal.concurrency == 0) {
    const double rate =
        largest(0, kMostBusy * most, [&](double r) { return meets(goal, speed_at(s, r)); });
    return speed_at(s, rate > 1e-6 * most ? rate : kMostBusy * most);
  }
  // Requests on the way are their rate times the time of each.
  const auto on_the_way = [&](double rate) { return rate * speed_at(s, rate).request_seconds; };
  const double rate = largest(0, most, [&](double r) { return on_the_way(r) < goal.concurrency; });
  ServerSpeed speed = speed_at(s, rate);
  // The rest of them waits where the servers have no room for their caches.
  const double waits = std::max(0.0, goal.concurrency / rate - speed.request_seconds);
  for (double* seconds :
       {&speed.first_token_seconds, &speed.p99_first_token_seconds, &speed.request_seconds})
    *seconds += waits;
  return speed;
}

namespace {

std::vector<Stream> streams_of(const ServerSystem& s) {
  const auto with = [&](ServerRole role) {
    std::vector<ServerGroup> groups;
    for (const ServerGroup& g : s.groups)
      if (g.role == role) groups.push_back(g);
    return groups;
  };
  if (!s.splits()) return {{with(ServerRole::kBoth), s.prompt_tokens, s.output_tokens}};
  // A decode server computes what is left of a prompt after its last whole page.
  return {{with(ServerRole::kPrefill), s.paged_tokens(), 1},
          {with(ServerRole::kDecode), s.prompt_tokens - s.paged_tokens(), s.output_tokens}};
}

std::vector<Queue> queues_at(const Stream& stream, double rate) {
  const std::vector<double> shares = shares_at(stream, rate);
  std::vector<Queue> queues;
  for (size_t i = 0; i < shares.size(); ++i) {
    const ServerGroup& g = stream.groups[i];
    queues.push_back(queue_at(g, stream, shares[i] * rate / g.queues()));
    queues.back().share = shares[i];
  }
  return queues;
}

// Prompts are divided by the groups' speeds. Answers are divided as the router does: the time of a
// step times one more than the number of sequences is the same everywhere, but where no sequence
// is.
std::vector<double> shares_at(const Stream& stream, double rate) {
  const int further = stream.output_tokens - 1;
  std::vector<double> rates;
  const auto divide = [&](double level) {
    double sum = 0;
    rates.clear();
    for (const ServerGroup& g : stream.groups) {
      StepTable& step = *g.step;
      const double chunk = std::min(g.chunk_tokens, stream.prompt_tokens);
      double each = chunk / stream.prompt_tokens / step(0, chunk);
      if (further > 0) {
        const double others = largest(0, std::min(g.most_sequences, g.chunk_tokens) - 1,
                                      [&](double n) { return (n + 1) * step(n + 1, 0) < level; });
        each = others / further / step(others + 1, 0);
      }
      rates.push_back(g.queues() * each);
      sum += rates.back();
    }
    return sum;
  };
  if (stream.groups.size() == 1) return {1};
  double high = 1e-3;
  constexpr double kMostSeconds = 1e5;
  if (further > 0) {
    while (divide(high) < rate && high < kMostSeconds) high *= 2;
    high = largest(0, high, [&](double level) { return divide(level) < rate; }) + 1e-9;
  }
  const double sum = divide(high);
  for (double& each : rates) each = sum > 0 ? each / sum : 1 / static_cast<double>(rates.size());
  return rates;
}

// One replica. A prompt takes n steps, in which sequences continue; while no prompt is there, steps
// have sequences only. A prompt meets the mean number of sequences. A sequence meets one more of
// them, itself, if requests choose a replica at random, and less the more replicas the router
// balances.
Queue queue_at(const ServerGroup& g, const Stream& stream, double rate) {
  StepTable& step = *g.step;
  const int further = stream.output_tokens - 1;  // tokens after the first
  const double c = g.queues();
  const auto with = [&](double sequences) {
    Queue q;
    q.sequences = sequences;
    q.whole = std::max(1.0, g.chunk_tokens - std::round(sequences));
    q.n_whole = std::ceil(stream.prompt_tokens / q.whole) - 1;
    q.rest = stream.prompt_tokens - q.n_whole * q.whole;
    q.prompt_seconds = q.n_whole * step(sequences, q.whole) + step(sequences, q.rest);
    q.busy = rate * q.prompt_seconds;
    q.sustained = q.busy < 1;
    if (!q.sustained) return q;
    // Deterministic service by several queues of which the shortest is taken: half the time of
    // exponential service (Sakasegawa 1977).
    q.chance = std::pow(q.busy, std::sqrt(2 * (c + 1)) - 1);
    q.wait = q.prompt_seconds / (2 * c * (1 - q.busy));
    if (further == 0) return q;
    q.met = std::max(1.0, sequences + 1.0 / c);
    const double decode = step(q.met, 0);
    const double steps = rate * (q.n_whole + 1) + (1 - q.busy) / decode;  // a second
    const double steady = rate / steps;
    // An answer begins where a prompt ends, and the prompts that are there by then come first: so
    // many more prompts than at other times.
    const double left = rate * (q.prompt_seconds + q.chance * q.wait) / (1 - q.busy) / c;
    const double more = (1 - (q.n_whole + 1) * steady) * left / further;
    q.rest_share = std::min(steady + more, 1 / (q.n_whole + 1));
    q.whole_share = q.n_whole * q.rest_share;
    q.gap = q.whole_share * step(q.met, q.whole) + q.rest_share * step(q.met, q.rest) +
            (1 - q.whole_share - q.rest_share) * decode;
    q.current_seconds = (1 - q.busy) * -std::expm1(-sequences) * decode / 2;
    return q;
  };
  const double most = std::min<double>(g.most_sequences, g.chunk_tokens - 1);
  Queue q = with(0);
  if (further > 0 && q.sustained) {
    // The number of sequences is their rate times the time of each.
    const auto grows = [&](double sequences) {
      const Queue then = with(sequences);
      return !then.sustained || rate * further * then.gap > sequences;
    };
    double low = 0, high = std::min(0.25, most);
    while (grows(high) && high < most) low = std::exchange(high, std::min(2 * high, most));
    q = with(largest(low, high, grows));
    q.sustained = q.sustained && !grows(high);
  }
  return q;
}

// The seconds that some of the requests take to their first token: at least `least`, and with this
// chance an exponentially distributed wait more.
struct FirstTokens {
  double share, least, chance, wait;
  double later_than(double seconds) const {
    if (seconds < least) return share;
    return wait > 0 ? share * chance * std::exp(-(seconds - least) / wait) : 0;
  }
};

void add_first_tokens(const ServerSystem& s, const std::vector<std::vector<Queue>>& queues,
                      ServerSpeed& speed) {
  std::vector<FirstTokens> all;
  const double bytes = s.paged_tokens() * s.kv_bytes_per_token;
  for (size_t i = 0; i < queues[0].size(); ++i) {
    const Queue& q = queues[0][i];
    const double least = q.prompt_seconds + q.current_seconds;
    if (!s.splits()) {
      all.push_back({q.share, least, q.chance, q.wait});
      continue;
    }
    // Keys of a chunk travel while later chunks are computed, one after the other: those of the
    // last chunk come after it, and all of them after the first.
    const ServerGroup g = streams_of(s)[0].groups[i];
    const double a_token = s.kv_bytes_per_token * g.n_replicas / s.network.bytes_per_second;
    const double first = (*g.step)(0, q.n_whole > 0 ? q.whole : q.rest);
    const double keys =
        std::max(q.rest * a_token, s.paged_tokens() * a_token - (q.prompt_seconds - first)) +
        2 * s.network.latency_seconds;
    speed.keys_seconds += q.share * keys;
    double receivers = 0;
    for (const ServerGroup& other : s.groups)
      if (other.role == ServerRole::kDecode) receivers += other.n_servers;
    const double a_second = speed.requests_per_second * bytes / s.network.bytes_per_second;
    speed.network_busy =
        std::max({speed.network_busy, a_second * q.share / g.n_servers, a_second / receivers});
    for (const Queue& d : queues[1])
      all.push_back({q.share * d.share,
                     least + keys + d.prompt_seconds + d.current_seconds + d.chance * d.wait,
                     q.chance, q.wait});
  }
  double longest = 0;
  for (const FirstTokens& f : all) {
    speed.first_token_seconds += f.share * (f.least + f.chance * f.wait);
    longest = std::max(longest, f.least + 20 * f.wait);
  }
  speed.p99_first_token_seconds = largest(0, longest, [&](double seconds) {
    double later = 0;
    for (const FirstTokens& f : all) later += f.later_than(seconds);
    return later > 0.01;
  });
}

// The number of sequences varies as the number of arrivals does: its variance is its mean.
void add_gaps(const ServerSystem& s, const std::vector<Queue>& queues, ServerSpeed& speed) {
  struct Gap {
    double seconds, share;
  };
  constexpr double kSpacing = 0.25, kMost = 3;  // standard deviations
  std::vector<Gap> gaps;
  double sum = 0;
  const std::vector<ServerGroup> groups = streams_of(s).back().groups;
  for (size_t i = 0; i < queues.size(); ++i) {
    const Queue& q = queues[i];
    speed.gap_seconds += q.share * q.gap;
    for (double z = -kMost; z <= kMost && q.share > 0; z += kSpacing) {
      const double share = q.share * std::exp(-z * z / 2);
      const double met = std::clamp<double>(q.met + z * std::sqrt(q.sequences), 1,
                                            std::max(1, groups[i].most_sequences));
      StepTable& step = *groups[i].step;
      gaps.push_back({step(met, 0), share * (1 - q.whole_share - q.rest_share)});
      gaps.push_back({step(met, q.whole), share * q.whole_share});
      gaps.push_back({step(met, q.rest), share * q.rest_share});
      sum += share;
    }
  }
  std::sort(gaps.begin(), gaps.end(),
            [](const Gap& one, const Gap& other) { return one.seconds < other.seconds; });
  const auto percentile = [&](double part) {
    double below = 0;
    for (const Gap& gap : gaps)
      if ((below += gap.share) >= part * sum) return gap.seconds;
    return gaps.back().seconds;
  };
  speed.p50_gap_seconds = percentile(0.5);
  speed.p99_gap_seconds = percentile(0.99);
}

}  // namespace

double StepTable::priced(int sequences, int prompt_tokens) {
  if (sequences == 0 && prompt_tokens == 0) return 0;
  const auto [known, is_new] = known_.try_emplace({sequences, prompt_tokens});
  if (is_new) known->second = price_(sequences, prompt_tokens);
  return known->second;
}

// Linear between 0, 1, 2, 3, 4, 6, 8, 12, 16 and so on, in both directions.
double StepTable::operator()(double sequences, double prompt_tokens) {
  struct Between {
    int low, high;
    double part;  // of the way from low to high
  };
  const auto between = [](double x, int jump) -> Between {
    int low = 0, high = 1;
    while (high < x) {
      const int next = high < 4 ? high + 1 : (high & (high - 1)) == 0 ? high / 2 * 3 : high / 3 * 4;
      low = std::exchange(high, next);
    }
    for (const int edge : {jump - 1, jump}) {
      if (edge > 0 && edge <= x) low = std::max(low, edge);
      if (edge > 0 && edge >= x) high = std::min(high, edge);
    }
    return {low, high, low == high ? 0 : (x - low) / (high - low)};
  };
  const Between s = between(sequences, 0);
  // A step with prompts is of another kind: it is not interpolated with one without.
  const Between p =
      prompt_tokens > 0 && prompt_tokens < 1 ? Between{1, 1, 0} : between(prompt_tokens, jump_);
  const auto along = [&](int n_prompt) {
    if (s.part == 0) return priced(s.low, n_prompt);
    const double high = priced(s.high, n_prompt);
    return s.part == 1 ? high : high + (1 - s.part) * (priced(s.low, n_prompt) - high);
  };
  if (p.part == 0) return along(p.low);
  if (p.part == 1) return along(p.high);
  const double low = along(p.low);
  return low + p.part * (along(p.high) - low);
}

}  // namespace tandem
