// A rank of mpi_test.py, which an MPI launcher starts several times.
//     mpi_ranks groups            checks every call of a group
//     mpi_ranks exchanges         checks every expert exchange
//     mpi_ranks threads           makes calls of a group in each of several threads
//     mpi_ranks long              sends long messages
//     mpi_ranks fewer, more       makes calls of which rank 1's have fewer or more bytes
//     mpi_ranks orders            makes calls of two groups in different orders
//     mpi_ranks steps SECONDS     makes calls until a rank is lost, with this patience
//     mpi_ranks pair SECONDS      stops rank 2 of 4, for which another rank waits in a smaller
//     group mpi_ranks end SECONDS       stops rank 1 when the others are done
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <iostream>
#include <thread>

#include "comm/mpi/mpi_world.h"
#include "core/memory.h"
#include "tests/comm_cases.h"
#include "tests/exchange_cases.h"

namespace tandem::test {
namespace {

void check_exchanges(Group& group) {
  const cpu::KernelTable kernels = cpu::kernels_for(cpu::best_isa());
  std::vector<HostLayout> layouts = {HostLayout::one_host(group.size())};
  if (group.size() == 4) {
    layouts.emplace_back(std::vector{0, 0, 1, 1});
    layouts.emplace_back(std::vector{0, 1, 0, 0});
  }
  for (const HostLayout& layout : layouts) {
    HostGroups groups(group, layout);
    for (const ExchangeKind& kind : exchange_kinds())
      if (kind.mode == ExchangeMode::kAllToAll || !layout.has_two_levels())
        check_exchange(groups, kernels, kind, 300, 4);
  }
}

// Threads whose ranks sleep or spin while they wait, beside the thread of the world.
void check_threads(Group& group) {
  constexpr int kThreads = 3;
  std::vector<std::unique_ptr<Group>> groups;
  for (int i = 0; i < kThreads; ++i) {
    groups.push_back(group.split(0));
    groups.back()->set_patience({std::chrono::seconds(20), i > 0});
  }
  const auto check = [](Group& g) {
    for (int round = 0; round < 3; ++round) {
      check_broadcast(g);
      check_all_gather(g);
      check_all_to_all(g);
      check_sums(g);
    }
  };
  std::vector<std::thread> threads;
  for (const auto& of_thread : groups) threads.emplace_back([&] { check(*of_thread); });
  check(group);
  for (std::thread& thread : threads) thread.join();
}

// More bytes than one message of MPI takes here, most of which are never written.
void check_long_messages(Group& group) {
  const int64_t n = (int64_t{1} << 30) + 4097;
  const Buffer x(n);
  const int64_t marks[] = {0, 1, n / 2, n - 4098, n - 4097, n - 4096, n - 1};
  for (const int64_t i : marks)
    x.data()[i] = group.rank() == 0 ? static_cast<std::byte>(1 + i % 251) : kUnwritten;
  group.broadcast(x.span(), 0);
  for (const int64_t i : marks) ASSERT_EQ(x.data()[i], static_cast<std::byte>(1 + i % 251)) << i;
}

// The step of a layer: groups of two kinds and a window.
void run_steps(Group& group) {
  const auto window = group.allocate_window(64);
  const auto pair = group.split(group.rank() / 2);
  std::vector<float> x(7168);
  std::cout << fmt::format("rank {} is process {}\n", group.rank(), getpid()) << std::flush;
  for (uint64_t step = 1;; ++step) {
    group.all_reduce(x);
    pair->all_reduce(x);
    for (int r = 0; r < group.size(); ++r) window->signal(r, step);
    for (int r = 0; r < group.size(); ++r) window->wait(r, step);
  }
}

// Rank 3 waits for rank 2, which stops, in another group than ranks 0 and 1.
void stop_in_a_pair(Group& group) {
  const auto pair = group.split(group.rank() / 2);
  std::cout << fmt::format("rank {} is process {}\n", group.rank(), getpid()) << std::flush;
  if (group.rank() == 2) raise(SIGSTOP);
  if (group.rank() >= 2) pair->barrier();
  group.barrier();
}

// Rank 1 stops when the other ranks have nothing left to do.
void stop_at_the_end(Group& group) {
  std::cout << fmt::format("rank {} is process {}\n", group.rank(), getpid()) << std::flush;
  if (group.rank() == 1) raise(SIGSTOP);
}

void call_differently(Group& group, int64_t bytes_of_root) {
  std::vector<std::byte> x(group.rank() == 1 ? bytes_of_root : 8);
  group.broadcast(x, 1);
}

int run(std::string_view what, double seconds) {
  const auto launch = launch_of([](const char* name) { return std::getenv(name); });
  if (!launch) {
    std::cerr << "error: no MPI launcher started this rank\n";
    return 2;
  }
  const auto group = open_mpi_world(*launch, {std::chrono::duration<double>(seconds)});
  if (what == "groups") check_group(*group);
  if (what == "long") check_long_messages(*group);
  if (what == "exchanges") check_exchanges(*group);
  if (what == "threads") check_threads(*group);
  if (what == "fewer") call_differently(*group, 7);
  if (what == "more") call_differently(*group, 9);
  if (what == "orders") call_in_two_orders(*group);
  if (what == "steps") run_steps(*group);
  if (what == "pair") stop_in_a_pair(*group);
  if (what == "end") stop_at_the_end(*group);
  return ::testing::Test::HasFailure() ? 1 : 0;
}

}  // namespace
}  // namespace tandem::test

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  // Failures are reported where they happen; there is no list of tests.
  try {
    return tandem::test::run(argc > 1 ? argv[1] : "", argc > 2 ? std::atof(argv[2]) : 20);
  } catch (const tandem::GroupError& error) {
    std::cout << fmt::format("error: {}; lost: {}\n", error.what(), error.lost) << std::flush;
  } catch (const tandem::Error& error) {
    std::cout << fmt::format("error: {}\n", error.what()) << std::flush;
  }
  std::_Exit(1);
}
