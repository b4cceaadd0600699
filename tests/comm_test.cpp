// Groups of one rank and of threads: every call with sizes of all kinds, sums whose bits depend on
// their order, ranks that are lost at every call, and ranks whose calls differ.
#include <sched.h>

#include <atomic>
#include <map>
#include <mutex>
#include <thread>

#include "comm/agreement.h"
#include "comm/alone.h"
#include "comm/delayed.h"
#include "comm/heartbeat.h"
#include "comm/hosts.h"
#include "comm/launch.h"
#include "comm/launcher.h"
#include "comm/local_ranks.h"
#include "comm/shared_window.h"
#include "comm/waiting.h"
#include "core/clock.h"
#include "tests/comm_cases.h"
#include "tests/error_of.h"
#include "tests/temp_directory.h"

namespace tandem::test {
namespace {

constexpr Patience kShort{std::chrono::milliseconds(300)};

TEST(Comm, OneRankAlone) {
  const auto alone = make_alone();
  check_group(*alone);
}

TEST(Comm, Threads) {
  for (const int n : {1, 2, 3, 4, 8}) run_local_ranks({n}, check_group);
}

// More floats than are summed at a time.
TEST(Comm, SumsOfAnySize) {
  run_local_ranks({2}, [](Group& group) {
    std::vector<float> x(17'000'000, 1.f + static_cast<float>(group.rank()));
    group.all_reduce(x);
    for (const float v : x) ASSERT_EQ(v, 3.f);
  });
}

// What run_on_all() throws on each rank.
struct Ended {
  std::string message;
  bool reported_here, while_running;
};

std::vector<Ended> ends_of(int n, const std::function<void(Group&)>& work) {
  std::vector<Ended> all(n);
  run_local_ranks({n}, [&](Group& group) {
    try {
      run_on_all(group, [&] { work(group); });
    } catch (const AgreedError& e) {
      all[group.rank()] = {e.what(), e.reported_here, e.while_running};
    }
  });
  return all;
}

TEST(Agreement, OneRankReportsAnError) {
  const auto of_some = ends_of(4, [](Group& group) {
    if (group.rank() == 1) throw RunError("at 1");
    if (group.rank() == 2) throw Error("at 2");
  });
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(of_some[rank].reported_here, rank == 1);
    EXPECT_TRUE(of_some[rank].while_running) << "the status is that of the rank that reports";
  }
  EXPECT_EQ(of_some[1].message, "at 1");
  for (const Ended& none : ends_of(3, [](Group&) {})) EXPECT_EQ(none.message, "");
}

// The rank that reports stays the same where agreements are nested.
TEST(Agreement, AnErrorIsAgreedOnOnce) {
  const auto ends = ends_of(
      3, [](Group& group) { run_on_all(group, [&] { require(group.rank() != 2, "wrong"); }); });
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(ends[rank].reported_here, rank == 2);
    EXPECT_FALSE(ends[rank].while_running);
  }
  EXPECT_EQ(ends[2].message, "wrong");
}

TEST(Agreement, TextsAreCompared) {
  const auto ends = ends_of(3, [](Group& group) {
    require_same(
        group, "model",
        "a model with a long description" + std::string(group.rank() == 1 ? ", larger" : ""));
  });
  EXPECT_EQ(ends[1].message,
            "the model of rank 1 differs from that of rank 0: \"h a long description, larger\" "
            "instead of \"h a long description\"; start all ranks alike");
  run_local_ranks({3}, [](Group& group) {
    EXPECT_EQ(text_of_first(group, std::to_string(10 + group.rank())), "10");
    EXPECT_EQ(text_of_first(group, group.rank() == 0 ? "" : "text"), "");
  });
}

// A step of every kind of call.
void step(Group& group, Window& window, Group& pair, uint64_t number) {
  group.barrier();
  std::vector<float> x(1000, 1.f);
  group.all_reduce(x);
  pair.all_reduce(x);
  std::vector<int> all(group.size());
  group.all_gather_values(group.rank(), std::span(all));
  for (int r = 0; r < group.size(); ++r) window.signal(r, number);
  for (int r = 0; r < group.size(); ++r) window.wait(r, number);
}

void run_steps(Group& group) {
  const auto window = group.allocate_window(8);
  const auto pair = group.split(group.rank() / 2);
  for (uint64_t number = 1; number <= 3; ++number) step(group, *window, *pair, number);
}

// Whichever call it is, the others end with an error that names the rank: at once when its thread
// has ended, after the patience when it has stopped.
TEST(Comm, ALostRankIsNamed) {
  for (const bool stops : {false, true})
    for (int64_t call = 0; call < 24; call += stops ? 3 : 1) {
      const int lost = static_cast<int>(call % 4);
      const auto begin = std::chrono::steady_clock::now();
      try {
        run_local_ranks({4, kShort, RankLoss{lost, call, stops}}, run_steps);
        ADD_FAILURE() << "call " << call << " is never made";
      } catch (const GroupError& error) {
        EXPECT_EQ(error.lost, lost) << error.what();
        EXPECT_EQ(error.what(),
                  fmt::format("rank {} {}", lost, stops ? "does not answer" : "has ended"));
      }
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      EXPECT_GE(took.count(), stops ? kShort.limit.count() : 0);
      EXPECT_LT(took.count(), 5.0);
    }
}

// The rank that others wait for, when those wait for it in another group.
TEST(Comm, TheLostRankIsNamedAcrossGroups) {
  try {
    run_local_ranks({4, kShort}, [](Group& group) {
      const auto pair = group.split(group.rank() / 2);
      if (group.rank() == 3) std::this_thread::sleep_for(3 * kShort.limit);
      if (group.rank() >= 2) pair->barrier();
      group.barrier();
    });
    ADD_FAILURE() << "no error";
  } catch (const GroupError& error) {
    EXPECT_EQ(error.lost, 3) << error.what();
  }
}

TEST(Comm, APatienceCanBeExtended) {
  run_local_ranks({2, kShort}, [](Group& group) {
    group.set_patience({std::chrono::seconds(60)});
    if (group.rank() == 1) std::this_thread::sleep_for(3 * kShort.limit);
    group.barrier();
  });
}

// CPU seconds of the calling thread.
double cpu_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

TEST(Comm, RanksMaySleepWhileTheyWait) {
  run_local_ranks({2, {std::chrono::seconds(20), true}}, [](Group& group) {
    check_group(group);
    group.set_patience({std::chrono::seconds(20), true});
    group.barrier();
    const double before = cpu_seconds();
    if (group.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(40));
    group.barrier();
    EXPECT_LT(cpu_seconds() - before, 0.03);
  });
}

// Ranks that share cores yield for 50 ms, and sleep in between from then on.
TEST(Comm, ALongWaitTakesLittleOfACore) {
  const auto start = Clock::now();
  int n_looks = 0;  // after 100 ms
  const auto look = [&] {
    n_looks += seconds_since(start) > 0.1;
    return false;
  };
  EXPECT_FALSE(wait_for(look, {std::chrono::milliseconds(400)}));
  EXPECT_GT(n_looks, 0);
  EXPECT_LE(n_looks, 300'000 / 50);
}

TEST(Comm, MessagesMayBeDelayed) {
  using std::chrono::milliseconds;
  run_local_ranks({3}, [](Group& group) {
    check_group(*make_delayed(group, {.delay = std::chrono::microseconds(20)}));
    const auto delayed = make_delayed(group, {.delay = milliseconds(20)});
    delayed->set_patience({std::chrono::seconds(20), true});
    const auto window = delayed->allocate_window(64);
    const auto took = [&](milliseconds late, const auto& call) {
      group.barrier();
      if (group.rank() == 2) std::this_thread::sleep_for(late);
      const auto begin = std::chrono::steady_clock::now();
      const double before = cpu_seconds();
      call();
      EXPECT_LT(cpu_seconds() - before, 0.04) << "a delay computes nothing";
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    };
    // A rank may leave the barrier before this one does.
    EXPECT_GE(took(milliseconds(0), [&] { delayed->barrier(); }), 0.015);
    const auto exchange = [&](uint64_t number) {
      for (int r = 0; r < 3; ++r) window->signal(r, number);
      for (int r = 0; r < 3; ++r) window->wait(r, number);
    };
    EXPECT_GE(took(milliseconds(0), [&] { exchange(1); }), 0.015);
    // What arrived long ago is there at once.
    const double late = took(milliseconds(60), [&] { exchange(2); });
    if (group.rank() == 2)
      EXPECT_LT(late, 0.02);
    else
      EXPECT_GE(late, 0.07);
    const double late_call = took(milliseconds(60), [&] { delayed->barrier(); });
    if (group.rank() == 2)
      EXPECT_LT(late_call, 0.02);
    else
      EXPECT_GE(late_call, 0.07);
  });
}

// Ranks 0 and 2 are on one host, and rank 1 on another.
TEST(Comm, ASimulatedNetworkIsBetweenHosts) {
  run_local_ranks({3}, [](Group& group) {
    const std::vector<int> hosts = {4, 7, 4};
    check_split(*make_delayed(group, {.host_of_rank = {1, 1, 1}}));
    std::atomic<int64_t> sent{0};
    const auto slow = make_delayed(group, {.delay = std::chrono::milliseconds(20),
                                           .bytes_per_second = 1e6,
                                           .host_of_rank = hosts,
                                           .bytes_sent = &sent});
    EXPECT_TRUE(says(error_of([&] { slow->allocate_window(64); }), "several hosts"));
    const auto here = slow->split(hosts[group.rank()]), pair = slow->split(group.rank() / 2);
    here->allocate_window(64);
    sent = 0;
    const auto took = [&](const auto& call) {
      group.barrier();
      const auto begin = std::chrono::steady_clock::now();
      call();
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    };
    double least = 1;  // of some: a busy machine wakes threads late
    for (int i = 0; i < 10; ++i) least = std::min(least, took([&] { here->barrier(); }));
    EXPECT_LT(least, 0.01) << "within a host";
    EXPECT_GE(took([&] { pair->barrier(); }), group.rank() < 2 ? 0.015 : 0);
    EXPECT_EQ(sent, 0);

    // Rank 1 gets 40 KB, which takes 40 ms, and ranks 0 and 2 get 10 KB each.
    constexpr int64_t k20 = 20'000, k10 = 10'000;
    const std::vector<std::vector<int64_t>> bytes = {{0, k20, k10}, {k10, 0, k10}, {k20, k20, 0}};
    std::vector<int64_t> to = bytes[group.rank()], from;
    for (int r = 0; r < 3; ++r) from.push_back(bytes[r][group.rank()]);
    std::vector<std::byte> in(to[0] + to[1] + to[2]), out(from[0] + from[1] + from[2]);
    const double seconds = took([&] { slow->all_to_all({in, to}, {out, from}); });
    EXPECT_GE(seconds, group.rank() == 1 ? 0.055 : 0.035);
    EXPECT_EQ(sent, k20) << "to the other host";

    // 200 KB of rank 0 take 200 ms to rank 1, and nothing to rank 2 of its own host.
    std::vector<std::byte> all(200'000);
    const double broadcast = took([&] { slow->broadcast(all, 0); });
    EXPECT_LT(group.rank() == 2 ? broadcast : 0, 0.15);
    EXPECT_GE(group.rank() == 1 ? broadcast : 1, 0.2);
    sent = 0;
    slow->all_gather_equal(std::span(in).first(100), std::span(out).first(300));
    EXPECT_EQ(sent, group.rank() == 1 ? 200 : 100);
    sent = 0;
    slow->broadcast(std::span(out).first(50), 1);
    EXPECT_EQ(sent, group.rank() == 1 ? 100 : 0);
  });
}

// As processes do, each thread maps the memory of all.
TEST(Comm, SharedWindows) {
  run_local_ranks({3}, [](Group& group) {
    const auto window = map_shared_window(group, 100);
    const std::byte mine[1] = {static_cast<std::byte>(group.rank())};
    for (int r = 0; r < 3; ++r) {
      window->of(r)[97 + group.rank()] = mine[0];
      window->signal(r, 1);
    }
    for (int r = 0; r < 3; ++r) {
      window->wait(r, 1);
      EXPECT_EQ(window->of(group.rank())[97 + r], std::byte(r));
    }
    for (int i = 0; i < 97; ++i) EXPECT_EQ(window->of(group.rank())[i], std::byte{0});
    const std::string error =
        error_of([&] { map_shared_window(group, 100 * (1 + group.rank() / 2)); });
    EXPECT_TRUE(says(error, "ranks 0 and 2 do not share memory, or their windows differ"));
  });
}

std::string error_between(const std::function<void(Group&)>& work) {
  return error_of([&] { run_local_ranks({2, kShort}, work); });
}

TEST(Comm, CallsThatDifferAreErrors) {
  EXPECT_TRUE(says(error_between([](Group& group) {
                     std::vector<std::byte> x(group.rank() == 0 ? 8 : 9);
                     group.broadcast(x, 0);
                   }),
                   "expects"));
  EXPECT_TRUE(says(error_between([](Group& group) {
                     std::vector<std::byte> x(8);
                     group.broadcast(x, group.rank());
                   }),
                   "broadcast from 1"));
  EXPECT_TRUE(says(error_between([](Group& group) {
                     std::vector<float> x(group.rank() == 0 ? 100 : 200);
                     group.all_reduce(x);
                   }),
                   "all_to_all"));
  EXPECT_TRUE(says(error_between([](Group& group) {
                     if (group.rank() == 0) return group.barrier();
                     std::vector<int> all(2);
                     group.all_gather_values(1, std::span(all));
                   }),
                   "barrier"));
  EXPECT_TRUE(says(error_between([](Group& group) { group.allocate_window(1 + group.rank()); }),
                   "different sizes"));
  EXPECT_TRUE(says(error_between([](Group& group) {
                     const auto window = group.allocate_window(8);
                     window->wait(1 - group.rank(), 1);
                   }),
                   "wait for each other"));
  EXPECT_TRUE(says(error_between(call_in_two_orders), "wait for each other"));
}

// What launchers set: Open MPI 4 and 5, MPICH's and Intel MPI's, srun with PMI-2 and with PMIx.
constexpr std::chrono::milliseconds kBeat(20);

TEST(Heartbeat, RanksMayPrepareLongerThanTheirPatience) {
  run_local_ranks({.n = 3}, [](Group& group) {
    Heartbeat heartbeat(
        group, [](const GroupError& e) { ADD_FAILURE() << e.what(); }, kShort, kBeat);
    std::this_thread::sleep_for(group.rank() * kShort.limit);
    heartbeat.end();
    heartbeat.end();  // does nothing
    group.barrier();
  });
}

TEST(Heartbeat, ALostRankIsNamedWhileRanksPrepare) {
  std::atomic<int> n_lost{0};
  run_local_ranks({.n = 3}, [&](Group& group) {
    if (group.rank() == 2) {  // it stops before its first beat
      const auto of_heartbeat = group.split(0);
      while (n_lost < 2) std::this_thread::sleep_for(kBeat);
      return;
    }
    std::atomic<bool> is_lost{false};
    const auto on_lost = [&](const GroupError& error) {
      EXPECT_EQ(error.lost, 2);
      EXPECT_TRUE(says(error.what(), "rank 2")) << error.what();
      ++n_lost;
      is_lost = true;
    };
    const Heartbeat heartbeat(group, on_lost, kShort, kBeat);
    while (!is_lost) std::this_thread::sleep_for(kBeat);
  });
  EXPECT_EQ(n_lost, 2);
}

// Whether the others still prepare or are ready.
TEST(Heartbeat, ARankThatLeavesIsLostToTheOthers) {
  for (const bool are_ready : {false, true}) {
    std::atomic<int> n_lost{0};
    run_local_ranks({.n = 3}, [&](Group& group) {
      std::atomic<bool> is_lost{false};
      const auto on_lost = [&](const GroupError& error) {
        EXPECT_STREQ(error.what(), "rank 1 has ended before the others");
        EXPECT_EQ(error.lost, 1);
        ++n_lost;
        is_lost = true;
      };
      Heartbeat heartbeat(group, on_lost, kShort, kBeat);
      if (group.rank() == 1) return;
      if (are_ready) heartbeat.end();
      while (!is_lost && !are_ready) std::this_thread::sleep_for(kBeat);
    });
    EXPECT_EQ(n_lost, 2);
  }
}

// An error that all ranks have ends them together.
TEST(Heartbeat, AllMayLeave) {
  run_local_ranks({.n = 3}, [](Group& group) {
    const Heartbeat heartbeat(
        group, [](const GroupError& e) { ADD_FAILURE() << e.what(); }, {},
        std::chrono::seconds(60));
    group.barrier();
  });
}

// Each rank tells what it has at that time, and hears of all; one may be silent.
TEST(Heartbeat, RanksTellEachOther) {
  run_local_ranks({.n = 3}, [](Group& group) {
    std::mutex mutex;
    std::vector<std::string> heard;
    std::atomic<int> n_told{0};
    Heartbeat heartbeat(
        group, [](const GroupError& e) { ADD_FAILURE() << e.what(); }, {}, kBeat);
    EXPECT_FALSE(heartbeat.goes_on_in_steps());
    heartbeat.go_on_in_steps();
    EXPECT_TRUE(heartbeat.goes_on_in_steps());
    const auto mine = [&] {
      return std::string(1000 * group.rank(), 'a') + std::to_string(++n_told);
    };
    const auto of_ranks = [&](std::span<const std::string> all) {
      const std::lock_guard lock(mutex);
      heard.assign(all.begin(), all.end());
    };
    if (group.rank() != 1) {
      EXPECT_TRUE(heartbeat.tell(&heard, {mine, of_ranks}));
      EXPECT_FALSE(heartbeat.tell(&mutex, {mine, of_ranks})) << "one tells";
      for (int i = 0; i < 1000; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        const std::lock_guard lock(mutex);
        if (heard.size() == 3 && heard[0] > "3" && heard[2].size() > 2000) break;
      }
      const std::lock_guard lock(mutex);
      ASSERT_EQ(heard.size(), 3u);
      EXPECT_GT(heard[0], "3");
      EXPECT_EQ(heard[1], "");
      EXPECT_EQ(heard[2].substr(0, 2000), std::string(2000, 'a'));
    }
    heartbeat.forget(&mutex);
    const int before = n_told;
    std::this_thread::sleep_for(10 * kBeat);
    EXPECT_EQ(n_told > before, group.rank() != 1) << "another's are not forgotten";
    heartbeat.forget(&heard);
    const int last = n_told;
    std::this_thread::sleep_for(5 * kBeat);
    EXPECT_EQ(n_told, last);
    heartbeat.end();
  });
}

TEST(Launch, WhatLaunchersSay) {
  using Variables = std::map<std::string, const char*>;
  const auto launch = [](const Variables& set) {
    return launch_of([&](const std::string& name) {
      const auto at = set.find(name);
      return at == set.end() ? nullptr : at->second;
    });
  };
  EXPECT_FALSE(launch({}));
  EXPECT_FALSE(launch({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}}));  // a shell of sbatch
  const auto open_mpi =
      launch({{"OMPI_COMM_WORLD_RANK", "5"}, {"OMPI_COMM_WORLD_SIZE", "8"}, {"PMIX_RANK", "5"}});
  ASSERT_TRUE(open_mpi);
  EXPECT_EQ(open_mpi->rank, 5);
  EXPECT_EQ(open_mpi->size, 8);
  EXPECT_STREQ(open_mpi->libraries.front(), "libmpi.so.40");
  const auto mpich = launch({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}});
  ASSERT_TRUE(mpich);
  EXPECT_EQ(mpich->rank, 0);
  EXPECT_EQ(mpich->size, 2);
  EXPECT_STREQ(mpich->libraries.front(), "libmpich.so.12");
  const auto pmix = launch({{"PMIX_RANK", "3"}, {"SLURM_STEP_NUM_TASKS", "16"}});
  ASSERT_TRUE(pmix);
  EXPECT_EQ(pmix->size, 16);
  EXPECT_EQ(pmix->rank, 3);
  EXPECT_TRUE(says(error_of([&] {
                     launch({{"PMI_RANK", "2"}, {"PMI_SIZE", "2"}});
                   }),
                   "PMI_RANK=2, but PMI_SIZE=2"));
  for (const char* wrong : {"", "x", "-1", "1x", "99999999999"})
    EXPECT_TRUE(says(error_of([&] {
                       launch({{"PMI_RANK", wrong}, {"PMI_SIZE", "2"}});
                     }),
                     fmt::format("PMI_RANK={} ", wrong)));
}

// Two hosts of three and two ranks. On the first one two ranks may use all cores, and one has cores
// of its own; on the second one each has, which the first one's have the numbers of.
TEST(Hosts, RanksOfAHostDivideTheCoresThatSeveralMayUse) {
  const std::vector<int> hosts = {0, 0, 1, 0, 1}, cores = {0, 1, 0, 0, 2};
  const PlaceOnHost want[] = {{0, 3, 0, 2}, {1, 3, 0, 1}, {0, 2, 0, 1}, {2, 3, 1, 2}, {1, 2, 0, 1}};
  for (int rank = 0; rank < 5; ++rank)
    EXPECT_EQ(place_on_host(hosts, cores, rank), want[rank]) << rank;
  run_local_ranks({3}, [](Group& group) {
    const int rank = group.rank();
    cpu_set_t before;
    ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
    EXPECT_EQ(place_on_host(group), (PlaceOnHost{rank, 3, rank, 3}));
    if (CPU_COUNT(&before) < 2) return;
    cpu_set_t fewer = before;  // for rank 1: without its first core
    for (int core = 0; core < CPU_SETSIZE && CPU_EQUAL(&fewer, &before); ++core)
      CPU_CLR(core, &fewer);
    sched_setaffinity(0, sizeof(fewer), rank == 1 ? &fewer : &before);
    EXPECT_EQ(place_on_host(group), (PlaceOnHost{rank, 3, rank == 2, rank == 1 ? 1 : 2}));
    sched_setaffinity(0, sizeof(before), &before);
  });
}

// mpirun of any folder before mpiexec of an earlier one. What cannot be executed is none.
TEST(Launcher, IsFoundInThePath) {
  const TempDirectory folders;
  const auto add = [&](const std::string& name, bool executable) {
    std::filesystem::create_directories(std::filesystem::path(folders.file(name)).parent_path());
    folders.write(name, "#!/bin/sh\n");
    if (executable)
      std::filesystem::permissions(folders.file(name), std::filesystem::perms::owner_all);
  };
  const std::string path = ":/none:" + folders.file("a") + ":" + folders.file("b") + ":";
  EXPECT_EQ(find_launcher(""), "");
  EXPECT_EQ(find_launcher(path), "");
  add("a/mpirun", false);
  std::filesystem::create_directories(folders.file("b/mpirun"));
  EXPECT_EQ(find_launcher(path), "");
  add("b/mpiexec", true);
  EXPECT_EQ(find_launcher(path), folders.file("b/mpiexec"));
  add("a/mpiexec", true);
  EXPECT_EQ(find_launcher(path), folders.file("a/mpiexec"));
  std::filesystem::remove(folders.file("b/mpirun"));
  add("b/mpirun", true);
  EXPECT_EQ(find_launcher(path), folders.file("b/mpirun"));
}

// The program in place of a launcher sees -n, the number, and the command; its status is returned,
// and signals reach it until a rank takes them.
TEST(Launcher, GetsTheCommandAndTheSignals) {
  const TempDirectory folder;
  const auto status = [&](const std::string& script) {
    folder.write("mpirun", "#!/bin/sh\n" + script);
    std::filesystem::permissions(folder.file("mpirun"), std::filesystem::perms::owner_all);
    const EndOfRanks end =
        run_ranks({.launcher = folder.file("mpirun"), .n = 3, .command = {"program", "a b", ""}});
    EXPECT_EQ(end.error, "");
    return end.status;
  };
  EXPECT_EQ(status("[ \"$*\" = '-n 3 program a b ' ] && [ $# = 5 ] && exit 7"), 7);
  EXPECT_EQ(status("exit 0"), 0);
  EXPECT_EQ(status("kill -KILL $$"), 128 + 9);
  EXPECT_EQ(status("trap 'exit 5' TERM; kill -TERM $TANDEM_STARTER; while :; do sleep 0.01; done"),
            5);
  // Programs in place of ranks say their numbers and end in a way of their own.
  folder.write("rank.py",
               "import os, signal, socket, struct, sys, time\n"
               "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
               "s.connect('\\0tandem-starter-' + os.environ['TANDEM_STARTER'])\n"
               "s.send(struct.pack('i', int(sys.argv[1])))\n"
               "signal.signal(signal.SIGINT, lambda *_: os._exit(6))\n"
               "time.sleep(0.1)\n"
               "if sys.argv[2] == 'asks':\n"
               "  os.kill(int(os.environ['TANDEM_STARTER']), signal.SIGINT)\n"
               "  time.sleep(60)\n"
               "if sys.argv[2] == 'ends': s.send(struct.pack('i', -1))\n"
               "if sys.argv[2] == 'fails': s.send(struct.pack('i', -2))\n"
               "os.kill(os.getpid(), 9)\n");
  const std::string rank = "rank() { python3 " + folder.file("rank.py") + " $1 $2; }\n";
  EXPECT_EQ(status(rank + "rank 0 asks"), 6) << "rank 0 takes the signal";
  const auto error = [&](const std::string& ranks) {
    folder.write("mpirun", "#!/bin/sh\n" + rank + ranks + "exit 9\n");
    std::filesystem::permissions(folder.file("mpirun"), std::filesystem::perms::owner_all);
    return run_ranks({.launcher = folder.file("mpirun"), .n = 3, .command = {"program"}}).error;
  };
  EXPECT_EQ(error("rank 0 ends; rank 1 ends;"), "");
  EXPECT_TRUE(error("rank 0 ends; rank 2 dies; rank 1 dies;").starts_with("rank 2 (process "));
  EXPECT_TRUE(error("rank 0 dies & rank 1 ends; wait;").starts_with("rank 0 (process "));
  EXPECT_TRUE(error("rank 0 dies; rank 1 fails; rank 2 dies;").starts_with("rank 0 (process "));
  EXPECT_EQ(error("rank 1 fails; rank 0 dies;"), "") << "the launcher ends it then";
  EXPECT_EQ(error("rank 1 dies; kill -TERM $TANDEM_STARTER; trap '' TERM; sleep 0.2;"), "");
  // A launcher that stays when its ranks have gone is killed, not before.
  // Its patience is longer than a program takes to start after another one has ended.
  const auto end_of_hanging = [&](const std::string& ranks, int seconds) {
    folder.write("mpirun", "#!/bin/sh\n" + rank + ranks + "sleep 60\n");
    std::filesystem::permissions(folder.file("mpirun"), std::filesystem::perms::owner_all);
    const EndOfRanks end = run_ranks({.launcher = folder.file("mpirun"),
                                      .n = 3,
                                      .command = {"program"},
                                      .launcher_patience = std::chrono::seconds(seconds)});
    return std::pair(end.status, end.error.substr(0, 6));
  };
  EXPECT_EQ(end_of_hanging("rank 0 ends & rank 1 ends; wait;", 1), std::pair(0, std::string()));
  EXPECT_EQ(end_of_hanging("rank 0 ends; rank 1 fails;", 5), std::pair(1, std::string()));
  EXPECT_EQ(end_of_hanging("rank 0 ends; rank 2 dies;", 5), std::pair(1, std::string("rank 2")));
  EXPECT_TRUE(says(error_of([&] {
                     run_ranks({.launcher = folder.file("none"), .n = 2, .command = {"program"}});
                   }),
                   folder.file("none") + " cannot be started: No such file"));
}

TEST(Comm, WhatWorkThrowsIsThrown) {
  EXPECT_EQ(error_between([](Group& group) {
              require(group.rank() != 1, "rank 1 has an error of its own");
              group.barrier();
            }),
            "rank 1 has an error of its own");
}

}  // namespace
}  // namespace tandem::test
