// The addresses of a backbone's workers: those of the command line, or of a file that is read again
// when it changes. A name with several addresses stands for all of them, and is asked for again.
#pragma once
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace tandem {

// HOST:PORT, one a line; empty lines and what follows a # are ignored. Throws Error that names
// `file`, the line and its text for a line that is no address or that is there twice, and for a
// file without addresses.
std::vector<std::string> worker_addresses_from(std::string_view text, const std::string& file);

// The workers that HOST:PORT `name` stands for, where a resolver has found these addresses of
// numbers, and it stood for `earlier` before. A host usually has one address of IPv4 and one of
// IPv6: then it is the name itself, and connecting tries both. Of more they are those of IPv4, or
// of IPv6 where these are more; a worker that has both is not used twice.
std::vector<std::string> workers_of_name(const std::string& name,
                                         const std::vector<std::string>& found,
                                         const std::vector<std::string>& earlier);

struct WorkerListOptions {
  std::vector<std::string> addresses = {};  // HOST:PORT
  std::string file = {};                    // instead of addresses; empty: none
  // The addresses of a name, as tcp_addresses_of() has them.
  std::function<std::vector<std::string>(const std::string&)> resolve;
  std::chrono::milliseconds period{1000};  // between two looks at the file
  // Called with one line: what has changed, and what is wrong with the list.
  std::function<void(const std::string&)> note = [](const std::string&) {};
  std::function<void(const std::string&)> warn = [](const std::string&) {};
};

struct ListedWorker {
  std::string address;
  bool is_of_several = false;  // that a name has
};

class WorkerList {
 public:
  // Reads the file and asks for the names. Throws Error for addresses that are malformed or there
  // twice, and for a file that cannot be read or has none.
  explicit WorkerList(WorkerListOptions options);
  ~WorkerList();
  WorkerList(const WorkerList&) = delete;
  WorkerList& operator=(const WorkerList&) = delete;

  // As they are at the start; not called after watch().
  std::vector<ListedWorker> workers() const;

  // Calls update(addresses) after each look at the list from now on, on a thread of its own, until
  // the list is destroyed; a list of addresses of numbers, which cannot change, is looked at only
  // where has_standbys, which are asked from update(). is_up(address): an address that a name has
  // no more stays while its worker is up, because resolvers may answer with some of many addresses.
  struct Watcher {
    std::function<void(const std::vector<std::string>&)> update;
    std::function<bool(const std::string&)> is_up;
    bool has_standbys = false;
  };
  void watch(Watcher watcher);

 private:
  void run();
  bool read_file();
  void resolve_names();
  void tell_problem(const std::string& source, const std::string& problem);

  const WorkerListOptions options_;
  // What follows is of the thread once it watches.
  std::vector<std::string> entries_;                         // names and addresses as listed
  std::map<std::string, std::vector<std::string>> workers_;  // [entries_] that they stand for
  std::map<std::string, std::string> problems_;              // that were told, of each source
  bool has_names_ = false;                                   // some entry is no address of numbers
  std::string seen_text_, used_text_;                        // of the file

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  Watcher watcher_;  // empty: not yet
  bool stops_ = false;
  std::thread thread_;  // the last member: it uses all others
};

}  // namespace tandem
