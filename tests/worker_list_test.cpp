// The addresses of workers: files that are edited while they are watched, and names with several
// addresses.
#include "offload/workers/worker_list.h"

#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <set>
#include <thread>

#include "core/clock.h"
#include "tests/error_of.h"
#include "tests/temp_directory.h"
#include "transport/tcp.h"

namespace tandem::test {
namespace {

using Addresses = std::vector<std::string>;
using std::chrono::milliseconds;

TEST(WorkerAddresses, AreOneALine) {
  const auto addresses = [](const std::string& text) {
    return worker_addresses_from(text, "workers.txt");
  };
  EXPECT_EQ(addresses("a:1"), Addresses{"a:1"});
  EXPECT_EQ(addresses("# all\n\n  a:1\t# first\r\n[::1]:2\nb.c:3"),
            (Addresses{"a:1", "[::1]:2", "b.c:3"}));
}

TEST(WorkerAddresses, AreRefusedWithTheirLine) {
  const auto refusal = [](const std::string& text) {
    return error_of([&] { worker_addresses_from(text, "workers.txt"); });
  };
  EXPECT_EQ(refusal("a:1\n# b\nnonsense\n"),
            "workers.txt line 3: nonsense: an address is HOST:PORT");
  EXPECT_EQ(refusal("a:1 b:2"), "workers.txt line 1: a:1 b:2: an address is HOST:PORT");
  EXPECT_EQ(refusal("a:1,b:2"), "workers.txt line 1: a:1,b:2: an address is HOST:PORT");
  EXPECT_EQ(refusal("http://a:1"), "workers.txt line 1: http://a:1: an address is HOST:PORT");
  EXPECT_EQ(refusal("a:70000"),
            "workers.txt line 1: a:70000: the port must be a number between 0 and 65535");
  EXPECT_EQ(refusal("a:1\nb:2\na:1"), "workers.txt line 3: a:1: is there twice");
  for (const char* const empty : {"", "\n", "# a:1\n"})
    EXPECT_EQ(refusal(empty), "workers.txt: there is no worker in it: write HOST:PORT, one a line");
}

TEST(WorkersOfName, AreItsAddressesWhereItHasSeveral) {
  const auto workers = [](const Addresses& found, const Addresses& earlier = {}) {
    return workers_of_name("w:9", found, earlier);
  };
  const Addresses name = {"w:9"};
  // One host, which may have both kinds of addresses.
  EXPECT_EQ(workers({"10.0.0.1:9"}), name);
  EXPECT_EQ(workers({"[::1]:9", "127.0.0.1:9"}), name);
  EXPECT_EQ(workers({"[::1]:9", "127.0.0.1:9"}, name), name);
  // Several hosts, each of which is one worker.
  EXPECT_EQ(workers({"10.0.0.1:9", "10.0.0.2:9"}), (Addresses{"10.0.0.1:9", "10.0.0.2:9"}));
  EXPECT_EQ(workers({"[fd::1]:9", "[fd::2]:9", "10.0.0.1:9", "10.0.0.2:9"}),
            (Addresses{"10.0.0.1:9", "10.0.0.2:9"}));
  EXPECT_EQ(workers({"[fd::1]:9", "[fd::2]:9", "10.0.0.1:9"}),
            (Addresses{"[fd::1]:9", "[fd::2]:9"}));
  EXPECT_EQ(workers({"10.0.0.1:9", "10.0.0.2:9"}, name), (Addresses{"10.0.0.1:9", "10.0.0.2:9"}));
  // The one that is left is the one that it was.
  EXPECT_EQ(workers({"10.0.0.2:9"}, {"10.0.0.1:9", "10.0.0.2:9"}), Addresses{"10.0.0.2:9"});
  EXPECT_EQ(workers({"[fd::2]:9", "10.0.0.2:9"}, {"[fd::1]:9", "[fd::2]:9"}),
            Addresses{"[fd::2]:9"});
  EXPECT_EQ(workers({"[fd::2]:9", "10.0.0.2:9"}, {"10.0.0.1:9", "10.0.0.2:9"}),
            Addresses{"10.0.0.2:9"});
}

TEST(WorkersOfName, AreAskedOfTheSystem) {
  for (const char* const address : {"10.0.0.1:9", "[::1]:9"})
    EXPECT_EQ(tcp_addresses_of(address), Addresses{address});
  const Addresses local = tcp_addresses_of("localhost:9");
  EXPECT_TRUE(std::count(local.begin(), local.end(), "127.0.0.1:9") == 1 ||
              std::count(local.begin(), local.end(), "[::1]:9") == 1);
  EXPECT_EQ(workers_of_name("localhost:9", local, {}), Addresses{"localhost:9"});
  EXPECT_THROW(tcp_addresses_of("no-such-host.invalid:9"), ConnectionError);
  EXPECT_TRUE(says(error_of([] { tcp_addresses_of("nonsense"); }), "an address is HOST:PORT"));
}

// Keeps what a list says, and waits for it.
class Seen {
 public:
  WorkerListOptions options(const std::string& file = {}) {
    return {.addresses = {},
            .file = file,
            .resolve = [this](const std::string& name) { return resolve(name); },
            .period = milliseconds(5),
            .note = [](const std::string&) {},
            .warn = [this](const std::string& line) { add(warnings_, line); }};
  }
  void watch(WorkerList& list) {
    list.watch({.update = [this](const Addresses& addresses) { set(addresses); },
                .is_up =
                    [this](const std::string& address) {
                      const std::lock_guard lock(mutex_);
                      return up_.contains(address);
                    }});
  }
  // Waits for the first list that is not this one.
  Addresses other_than(const Addresses& before) {
    for (int i = 0; i < 1000; ++i) {
      Addresses now = addresses();
      if (!now.empty() && now != before) return now;
      std::this_thread::sleep_for(milliseconds(5));
    }
    return before;
  }
  // Waits for so many more looks at the list.
  Addresses after(int n_looks) {
    const int until = n_updates_ + n_looks;
    for (int i = 0; i < 2000 && n_updates_ < until; ++i)
      std::this_thread::sleep_for(milliseconds(5));
    return addresses();
  }
  void set_found(const Addresses& found) { lock(found_) = found; }
  void set_up(const std::set<std::string>& up) { lock(up_) = up; }
  Addresses warnings() { return lock(warnings_); }

 private:
  // For one expression.
  template <class T>
  struct Locked {
    std::unique_lock<std::mutex> held;
    T& value;
    void operator=(const T& other) { value = other; }
    operator T() const { return value; }
  };
  template <class T>
  Locked<T> lock(T& value) {
    return {std::unique_lock(mutex_), value};
  }
  void add(Addresses& to, const std::string& line) {
    const std::lock_guard lock(mutex_);
    to.push_back(line);
  }
  void set(const Addresses& addresses) {
    const std::lock_guard lock(mutex_);
    addresses_ = addresses;
    ++n_updates_;
  }
  Addresses addresses() { return lock(addresses_); }
  Addresses resolve(const std::string& name) {
    if (!name.starts_with("pods")) return {name};
    Addresses found = lock(found_);
    if (found.empty()) throw ConnectionError("Host not found");
    return found;
  }

  std::mutex mutex_;  // guards what follows
  Addresses addresses_, found_, warnings_;
  std::set<std::string> up_;
  std::atomic<int> n_updates_{0};
};

// At once: a list never sees the file empty, however long this thread is held up.
void write(const std::string& file, const std::string& text) {
  std::ofstream(file + ".new", std::ios::trunc) << text;
  std::filesystem::rename(file + ".new", file);
}

Addresses at_start(const WorkerList& list) {
  Addresses addresses;
  for (const ListedWorker& worker : list.workers()) addresses.push_back(worker.address);
  return addresses;
}

TEST(WorkerList, FollowsItsFile) {
  const TempDirectory folder;
  const std::string file = folder.file("workers.txt");
  write(file, "a:1\nb:2\n");
  Seen seen;
  WorkerList list(seen.options(file));
  EXPECT_EQ(at_start(list), (Addresses{"a:1", "b:2"}));
  seen.watch(list);
  const Addresses two = seen.other_than({});
  EXPECT_EQ(two, (Addresses{"a:1", "b:2"}));

  // What is wrong is told once, and changes nothing.
  for (const char* const text : {"a:1\nb:2\nc\n", "", "a:1\na:1\n"}) {
    write(file, text);
    EXPECT_EQ(seen.after(10), two) << text;
  }
  std::filesystem::remove(file);
  EXPECT_EQ(seen.after(10), two);
  const Addresses warnings = seen.warnings();
  const std::string as_before = "the workers of " + file + " stay as they were: " + file;
  ASSERT_EQ(warnings.size(), 4u);
  EXPECT_EQ(warnings[0], as_before + " line 3: c: an address is HOST:PORT");
  EXPECT_TRUE(says(warnings[1], "there is no worker in it"));
  EXPECT_EQ(warnings[2], as_before + " line 2: a:1: is there twice");
  EXPECT_TRUE(says(warnings[3], "cannot open"));

  // As it was, and then others. An error that comes again is told again.
  write(file, "a:1\nb:2\n");
  EXPECT_EQ(seen.after(10), two);
  write(file, "a:1\nb:2\nc\n");
  EXPECT_EQ(seen.after(10), two);
  EXPECT_EQ(seen.warnings().size(), 5u);
  write(file, "b:2\nc:3\n");
  EXPECT_EQ(seen.other_than(two), (Addresses{"b:2", "c:3"}));
  EXPECT_EQ(seen.warnings().size(), 5u);
}

// A file that is written slowly is read when it stays as it is.
TEST(WorkerList, DoesNotReadHalfAFile) {
  const TempDirectory folder;
  const std::string file = folder.file("workers.txt");
  write(file, "a:1\n");
  Seen seen;
  WorkerListOptions options = seen.options(file);
  options.period = milliseconds(100);
  WorkerList list(options);
  seen.watch(list);
  ASSERT_EQ(seen.other_than({}), Addresses{"a:1"});
  std::ofstream out(file, std::ios::trunc);
  double longest = 0;  // without a new line, on a machine that others use
  for (int i = 0; i < 20; ++i) {
    const Stopwatch watch;
    out << "b:1" << i << std::endl;
    std::this_thread::sleep_for(milliseconds(20));
    longest = std::max(longest, watch.seconds());
    if (longest < 0.08) {
      EXPECT_EQ(seen.after(0), Addresses{"a:1"});
    }
  }
  for (int i = 0; i < 500 && seen.after(0).size() < 20; ++i)
    std::this_thread::sleep_for(milliseconds(10));
  EXPECT_EQ(seen.after(0).size(), 20u);
}

TEST(WorkerList, FollowsTheAddressesOfAName) {
  Seen seen;
  seen.set_found({"10.0.0.1:9", "10.0.0.2:9"});
  WorkerListOptions options = seen.options();
  options.addresses = {"pods:9", "10.0.0.2:9", "h:1"};
  WorkerList list(options);
  EXPECT_EQ(at_start(list), (Addresses{"10.0.0.1:9", "10.0.0.2:9", "h:1"}));
  EXPECT_TRUE(list.workers()[0].is_of_several);
  EXPECT_FALSE(list.workers()[2].is_of_several);
  seen.set_up({"10.0.0.1:9", "10.0.0.2:9", "h:1"});
  seen.watch(list);
  const Addresses first = seen.other_than({});
  EXPECT_EQ(first, (Addresses{"10.0.0.1:9", "10.0.0.2:9", "h:1"}));
  // A worker that is up stays, though the resolver does not answer with it.
  seen.set_found({"10.0.0.2:9", "10.0.0.3:9"});
  const Addresses three = seen.other_than(first);
  EXPECT_EQ(three, (Addresses{"10.0.0.2:9", "10.0.0.3:9", "10.0.0.1:9", "h:1"}));
  seen.set_up({"10.0.0.2:9"});
  const Addresses two = seen.other_than(three);
  EXPECT_EQ(two, (Addresses{"10.0.0.2:9", "10.0.0.3:9", "h:1"}));
  // Nothing is known of a name that cannot be resolved.
  seen.set_up({});
  seen.set_found({});
  EXPECT_EQ(seen.after(20), two);
  EXPECT_EQ(seen.warnings(), Addresses{"the workers of pods:9 stay as they were: Host not found"});
  seen.set_found({"10.0.0.4:9"});
  EXPECT_EQ(seen.other_than(two), (Addresses{"10.0.0.4:9", "10.0.0.2:9", "h:1"}));
}

TEST(WorkerList, KeepsANameThatIsNotKnownYet) {
  Seen seen;
  WorkerListOptions options = seen.options();
  options.addresses = {"pods:9"};
  WorkerList list(options);
  EXPECT_EQ(at_start(list), Addresses{"pods:9"});
  seen.watch(list);
  EXPECT_EQ(seen.other_than({}), Addresses{"pods:9"});
  seen.set_found({"10.0.0.1:9", "10.0.0.2:9"});
  EXPECT_EQ(seen.other_than({"pods:9"}), (Addresses{"10.0.0.1:9", "10.0.0.2:9"}));
}

TEST(WorkerList, RefusesAddressesOfTheCommandLine) {
  const auto refusal = [](const Addresses& addresses) {
    Seen seen;
    WorkerListOptions options = seen.options();
    options.addresses = addresses;
    return error_of([&] { WorkerList list(options); });
  };
  EXPECT_EQ(refusal({"a:1", "a:1"}), "--workers a:1: is there twice");
  EXPECT_EQ(refusal({"nonsense"}), "--workers nonsense: an address is HOST:PORT");
}

}  // namespace
}  // namespace tandem::test
