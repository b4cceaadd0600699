#include "offload/workers/worker_list.h"

#include <algorithm>

#include "core/check.h"
#include "io/json.h"
#include "io/listed_lines.h"
#include "transport/tcp.h"

namespace tandem {
namespace {

constexpr int64_t kMostFileBytes = 1 << 20;
constexpr int kLooksPerResolve = 5;

bool contains(const std::vector<std::string>& all, const std::string& one) {
  return std::find(all.begin(), all.end(), one) != all.end();
}

// Throws Error, after `where`.
void append(std::vector<std::string>& addresses, const std::string& address,
            const std::string& where) {
  try {
    require_tcp_address(address);
  } catch (const Error& error) {
    fail("{} {}", where, error.what());
  }
  require(!contains(addresses, address), "{} {}: is there twice", where, address);
  addresses.push_back(address);
}

}  // namespace

std::vector<std::string> worker_addresses_from(std::string_view text, const std::string& file) {
  std::vector<std::string> addresses;
  for (const ListedLine& line : listed_lines(text))
    append(addresses, std::string(line.entry), fmt::format("{} line {}:", file, line.number));
  require(!addresses.empty(), "{}: there is no worker in it: write HOST:PORT, one a line", file);
  return addresses;
}

std::vector<std::string> workers_of_name(const std::string& name,
                                         const std::vector<std::string>& found,
                                         const std::vector<std::string>& earlier) {
  std::vector<std::string> ipv4, ipv6;
  for (const std::string& address : found)
    (address.starts_with('[') ? ipv6 : ipv4).push_back(address);
  const bool was_several = !earlier.empty() && !contains(earlier, name);
  if (!was_several && ipv4.size() <= 1 && ipv6.size() <= 1) return {name};
  // One address that is left keeps its name, and so its connection.
  if (ipv4.size() == ipv6.size() && was_several && earlier[0].starts_with('[')) return ipv6;
  return ipv6.size() > ipv4.size() ? ipv6 : ipv4;
}

WorkerList::WorkerList(WorkerListOptions options) : options_(std::move(options)) {
  if (options_.file.empty()) {
    for (const std::string& address : options_.addresses) append(entries_, address, "--workers");
  } else {
    seen_text_ = used_text_ = read_text_file(options_.file, kMostFileBytes);
    entries_ = worker_addresses_from(used_text_, options_.file);
  }
  resolve_names();
  thread_ = std::thread([this] { run(); });
}

WorkerList::~WorkerList() {
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

std::vector<ListedWorker> WorkerList::workers() const {
  std::vector<ListedWorker> all;
  for (const std::string& entry : entries_)
    for (const std::string& address : workers_.at(entry))
      if (std::none_of(all.begin(), all.end(),
                       [&](const ListedWorker& other) { return other.address == address; }))
        all.push_back({address, address != entry});
  return all;
}

void WorkerList::watch(Watcher watcher) {
  {
    const std::lock_guard lock(mutex_);
    watcher_ = std::move(watcher);
  }
  changed_.notify_all();
}

void WorkerList::run() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return watcher_.update || stops_; });
  if (!has_names_ && options_.file.empty() && !watcher_.has_standbys) return;
  for (int n_looks = 1; !stops_; ++n_looks) {
    lock.unlock();
    const bool is_new = !options_.file.empty() && read_file();
    if (is_new || n_looks % kLooksPerResolve == 0) resolve_names();
    std::vector<std::string> addresses;
    for (const ListedWorker& worker : workers()) addresses.push_back(worker.address);
    watcher_.update(addresses);
    lock.lock();
    changed_.wait_for(lock, options_.period, [&] { return stops_; });
  }
}

// Returns whether the list is another one. A text is used once it was seen twice: the one before
// may have been written at that moment.
bool WorkerList::read_file() {
  try {
    const std::string text = read_text_file(options_.file, kMostFileBytes);
    const bool is_same = text == used_text_;
    if (is_same) problems_.erase(options_.file);
    if (std::exchange(seen_text_, text) != text || is_same) return false;
    entries_ = worker_addresses_from(text, options_.file);
    used_text_ = text;
    problems_.erase(options_.file);
    options_.note(fmt::format("{}: {} workers", options_.file, entries_.size()));
    return true;
  } catch (const Error& error) {
    tell_problem(options_.file, error.what());
    return false;
  }
}

// A name that cannot be resolved now stands for what it stood for.
void WorkerList::resolve_names() {
  std::map<std::string, std::vector<std::string>> resolved;
  for (const std::string& entry : entries_) {
    std::vector<std::string>& now = resolved[entry];
    const auto before = workers_.find(entry);
    const std::vector<std::string> earlier =
        before == workers_.end() ? std::vector<std::string>() : before->second;
    try {
      const std::vector<std::string> found = options_.resolve(entry);
      has_names_ = has_names_ || found != std::vector{entry};
      now = workers_of_name(entry, found, earlier);
      problems_.erase(entry);
    } catch (const Error& error) {
      has_names_ = true;
      now = earlier.empty() ? std::vector{entry} : earlier;
      if (!earlier.empty()) tell_problem(entry, error.what());
      continue;
    }
    for (const std::string& address : earlier)
      if (address != entry && !contains(now, address) && watcher_.is_up(address))
        now.push_back(address);
  }
  workers_ = std::move(resolved);
}

void WorkerList::tell_problem(const std::string& source, const std::string& problem) {
  if (std::exchange(problems_[source], problem) == problem) return;
  options_.warn(fmt::format("the workers of {} stay as they were: {}", source, problem));
}

}  // namespace tandem
