// Timelines of several ranks in one text: a process a rank, on one axis of time, also where hosts
// have clocks of their own.
#include "offload/ranks/rank_timelines.h"

#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "comm/hosts.h"
#include "comm/local_ranks.h"
#include "engine/completion.h"
#include "tests/rank_grids.h"

namespace tandem::test {
namespace {

using Json = nlohmann::json;

std::map<int, std::vector<Json>> events_of_ranks(const std::string& text) {
  std::map<int, std::vector<Json>> events;
  const Json trace = Json::parse(text);
  for (const Json& event : trace["traceEvents"])
    if (event["ph"] == "X") events[event["pid"]].push_back(event);
  return events;
}

std::map<int, std::string> names_of_ranks(const std::string& text) {
  std::map<int, std::string> names;
  const Json trace = Json::parse(text);
  for (const Json& event : trace["traceEvents"])
    if (event["name"] == "process_name") names[event["pid"]] = event["args"]["name"];
  return names;
}

// The span of a rank begins `rank` ms after that of rank 0 and takes 10 ms. Clocks of other hosts
// are 1000 s behind or ahead.
TEST(RankTimelines, HaveOneAxisOfTime) {
  const std::vector<int> hosts = {0, 0, 1, 2};
  const double ahead[] = {0, 0, -1000, 1000};
  std::string text;
  run_local_ranks({4}, [&](Group& group) {
    const int rank = group.rank();
    Timeline timeline;
    timeline.start_step(8 + rank);
    const double begin = 5000 + 1e-3 * rank + ahead[rank];
    timeline.add({"experts", Timeline::Track::kCpu, 3, 0, begin, begin + 10e-3});
    const RankPlace place = {"h" + std::to_string(hosts[rank]), hosts,
                             [&] { return seconds_since({}) + ahead[rank]; }};
    const std::string own = rank_timelines_json(group, rank == 1 ? nullptr : &timeline, {}, place);
    if (rank == 0) text = own;
    EXPECT_EQ(own.empty(), rank != 0);
  });
  const auto names = names_of_ranks(text);
  ASSERT_EQ(names.size(), 4u);
  EXPECT_EQ(names.at(0), "rank 0 on host h0");
  EXPECT_EQ(names.at(1), "rank 1 on host h0");
  EXPECT_TRUE(names.at(2).starts_with("rank 2 on host h1, clock within ")) << names.at(2);
  const auto events = events_of_ranks(text);
  ASSERT_EQ(events.size(), 3u) << "rank 1 has recorded nothing";
  for (const int rank : {0, 2, 3}) {
    ASSERT_EQ(events.at(rank).size(), 1u);
    const Json& event = events.at(rank)[0];
    EXPECT_NEAR(event["ts"].get<double>(), 1e3 * rank, rank == 0 ? 1 : 5e4) << rank;
    EXPECT_NEAR(event["dur"].get<double>(), 10e3, 1);
    EXPECT_EQ(event["args"]["tokens"], 8 + rank);
  }
  EXPECT_EQ(Json::parse(text)["mean_seconds_a_layer"][0]["tokens"], 8);
}

// Rank 2 takes its time to answer, and reads its clock at the end of it.
TEST(RankTimelines, ClocksAreKnownWithinWhatTheySay) {
  run_local_ranks({3}, [&](Group& group) {
    const auto now = [&] {
      if (group.rank() == 2) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      return seconds_since({}) + (group.rank() == 2 ? 77 : 0);
    };
    const auto clocks = clock_differences(group, {0, 0, 1}, now);
    ASSERT_EQ(clocks.size(), 3u);
    EXPECT_EQ(clocks[1].seconds, 0);
    EXPECT_EQ(clocks[1].within, 0);
    EXPECT_GT(clocks[2].within, 1e-3);
    EXPECT_LE(std::abs(clocks[2].seconds + 77), clocks[2].within + 1e-9);
  });
}

// Four replicas of the embedded model: all are in each step, at the same time.
TEST(RankTimelines, ShowAllRanksOfAStep) {
  constexpr int kRanks = 4;
  ModelOptions options = {.directory = kTinyR1,
                          .isa = cpu::Isa::kReference,
                          .context = 64,
                          .max_kv_tokens = 512,
                          .step_tokens = 16,
                          .max_logits = 8,
                          .n_replicas = kRanks,
                          .dispatch = ExpertDispatch::kGather,
                          .record_timeline = true};
  std::string text;
  run_local_ranks({kRanks}, [&](Group& group) {
    StepChannel steps(group, [](const GroupError& error) { ADD_FAILURE() << error.what(); });
    LoadedModel loaded(on_rank(options, group, &steps));
    if (steps.leads()) {
      Engine engine(loaded.model(), loaded.cache(), {.size = loaded.config().vocab},
                    loaded.context(), {.max_running = 8});
      std::vector<Request> requests(8);
      for (Request& request : requests) {
        request.prompt.assign(9, 20 + static_cast<int>(&request - requests.data()));
        request.max_new_tokens = 4;
      }
      complete(engine, requests);
      steps.end();
      steps.end();  // does nothing
    } else {
      steps.follow();
    }
    const std::string own = rank_timelines_json(group, loaded.timeline());
    if (group.rank() == 0) text = own;
  });
  const auto events = events_of_ranks(text);
  ASSERT_EQ(std::ssize(events), kRanks);
  EXPECT_EQ(std::ssize(names_of_ranks(text)), kRanks);
  const int n_steps = events.at(0).back()["args"]["step"].get<int>() + 1;
  EXPECT_GE(n_steps, 4);
  double earliest = 1e9;
  for (int step = 0; step < n_steps; ++step) {
    double last_begin = 0, first_end = 1e12;
    for (const auto& [rank, all] : events) {
      double begin = 1e12, end = 0;
      for (const Json& event : all) {
        if (event["args"]["step"] != step) continue;
        begin = std::min(begin, event["ts"].get<double>());
        end = std::max(end, event["ts"].get<double>() + event["dur"].get<double>());
      }
      ASSERT_LT(begin, end) << "rank " << rank << ", step " << step;
      earliest = std::min(earliest, begin);
      last_begin = std::max(last_begin, begin);
      first_end = std::min(first_end, end);
    }
    EXPECT_LT(last_begin, first_end) << "no rank ends step " << step << " before another begins it";
  }
  EXPECT_NEAR(earliest, 0, 1e-3);
}

}  // namespace
}  // namespace tandem::test
