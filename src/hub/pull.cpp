#include "hub/pull.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <list>
#include <mutex>
#include <utility>

#include "core/clock.h"
#include "core/memory.h"
#include "core/run_error.h"
#include "hub/checked_files.h"
#include "hub/partial_file.h"
#include "io/workers.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr const char* kLastFile = "config.json";  // without it no loader takes the folder

// Keeps a second call out of the folder; the kernel drops the lock when the process ends.
class FolderLock {
 public:
  explicit FolderLock(const std::string& path)
      : fd_(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644)) {
    require(fd_ >= 0, "{} cannot be written: {}", path, std::strerror(errno));
    if (flock(fd_, LOCK_EX | LOCK_NB) == 0) return;
    close(fd_);
    fail("{}: another process is fetching into this folder", path);
  }
  FolderLock(const FolderLock&) = delete;
  ~FolderLock() { close(fd_); }

 private:
  const int fd_;
};

std::string made(const std::string& directory) {
  std::error_code error;
  fs::create_directories(directory, error);
  require(fs::is_directory(directory, error), "{} cannot be made: name a folder that can be",
          directory);
  return directory;
}

// Calls an event if somebody listens.
template <class Event, class... Args>
void tell(const Event& event, Args&&... args) {
  if (event) event(std::forward<Args>(args)...);
}

class Pull {
 public:
  Pull(const PullOptions& options, const PullEvents& events,
       std::vector<HttpConnection>& connections, const HubListing& listing)
      : options_(options),
        events_(events),
        connections_(connections),
        listing_(listing),
        folder_(made(made(options.directory) + "/.pull")),
        lock_(folder_ + "/lock"),
        checked_(folder_ + "/checked.json") {}

  PullReport run() {
    const Stopwatch watch;
    find_missing();
    int64_t missing = 0, kept = 0;
    for (const PartialFile& file : missing_) {
      missing += file.file().bytes;
      kept += file.bytes_done();
    }
    tell(events_.start, listing_, static_cast<int>(missing_.size()), missing, kept);
    check_space(missing - kept);
    fetch_missing(missing);
    put_in_place();
    PullReport report{.commit = listing_.commit,
                      .n_files = static_cast<int>(listing_.files.size()),
                      .n_fetched = static_cast<int>(missing_.size()),
                      .bytes = listing_.bytes(),
                      .fetched_bytes = received_};
    for (const HubFile& file : listing_.files)
      report.n_unchecked += file.digest.kind == Digest::Kind::kNone ? 1 : 0;
    report.seconds = watch.seconds();
    return report;
  }

 private:
  struct Item {
    PartialFile* file;
    int range;
    std::atomic<int>* n_left;  // ranges of the file
  };

  std::string target(const HubFile& file) const { return options_.directory + "/" + file.path; }

  // Files that are there with the right size are read, unless they were before.
  void find_missing() {
    std::vector<const HubFile*> unsure;
    std::vector<char> there(listing_.files.size());
    int64_t total = 0;
    for (size_t i = 0; i < listing_.files.size(); ++i) {
      const HubFile& file = listing_.files[i];
      std::error_code error;
      if (!fs::is_regular_file(target(file), error)) continue;
      if (fs::file_size(target(file), error) != static_cast<uintmax_t>(file.bytes)) continue;
      there[i] = file.digest.kind == Digest::Kind::kNone || checked_.has(file, target(file));
      if (there[i]) continue;
      unsure.push_back(&file);
      total += file.bytes;
    }
    std::atomic<int64_t> done = 0;
    std::mutex mutex;
    Workers workers;
    workers.run(
        options_.n_connections, static_cast<int64_t>(unsure.size()),
        [&](int64_t i, int) {
          const HubFile& file = *unsure[i];
          const int fd = open(target(file).c_str(), O_RDONLY | O_CLOEXEC);
          require(fd >= 0, "{} cannot be read: {}", target(file), std::strerror(errno));
          const Digest digest =
              digest_of(fd, file.bytes, file.digest.kind, [&] { return !workers.stopped(); });
          close(fd);
          done += file.bytes;
          if (!(digest == file.digest)) return;
          const std::lock_guard lock(mutex);
          there[&file - listing_.files.data()] = 1;
          checked_.add(file, target(file));
        },
        [&](double seconds) { tell(events_.checking, done.load(), total, seconds); });
    checked_.save();
    for (size_t i = 0; i < listing_.files.size(); ++i)
      if (!there[i]) missing_.emplace_back(listing_.files[i], folder_);
  }

  void check_space(int64_t bytes) const {
    std::error_code error;
    const fs::space_info space = fs::space(folder_, error);
    require(error || static_cast<int64_t>(space.available) >= bytes,
            "{}: {:.2f} GB are still to be fetched and {:.2f} GB are free: choose another --dir",
            options_.directory, gigabytes(bytes), gigabytes(static_cast<int64_t>(space.available)));
  }

  void fetch_missing(int64_t total) {
    std::vector<Item> items;
    std::list<std::atomic<int>> counts;
    for (PartialFile& file : missing_) {
      if (file.checked()) continue;
      std::atomic<int>& n_left = counts.emplace_back(file.n_ranges());
      for (int i = 0; i < file.n_ranges(); ++i) items.push_back({&file, i, &n_left});
    }
    Workers workers;
    go_on_ = [&] { return !workers.stopped(); };
    const auto fetch = [&](int64_t i, int worker) {
      const Item& item = items[i];
      fetch_range(*item.file, item.range, connections_[worker]);
      if (go_on_() && --*item.n_left == 0) check(*item.file, connections_[worker]);
    };
    const auto report = [&](double seconds) {
      int64_t done = 0;
      for (const PartialFile& file : missing_) done += file.bytes_done();
      tell(events_.progress, done, received_.load(), total, seconds);
    };
    try {
      workers.run(options_.n_connections, static_cast<int64_t>(items.size()), fetch, report);
    } catch (...) {
      for (PartialFile& file : missing_)
        if (file.bytes_done() > 0) file.save();
      throw;
    }
  }

  // Returns when the range is there, or when another thread failed.
  void fetch_range(PartialFile& file, int range, HttpConnection& connection) {
    const std::string url = options_.address.file_url(listing_.commit, file.file().path);
    Retries retries(options_.n_tries);
    int64_t furthest = file.next(range);
    while (file.next(range) < file.end(range) && go_on_()) {
      const HttpReply reply = request(url, file, range, connection);
      if (file.next(range) > furthest) {
        furthest = file.next(range);
        retries.succeeded();
      } else if (go_on_()) {
        retries.wait(url, reply, go_on_);
      }
    }
  }

  // One request for what is left of a range.
  HttpReply request(const std::string& url, PartialFile& file, int range,
                    HttpConnection& connection) {
    const int64_t begin = file.next(range), end = file.end(range);
    const bool whole = begin == 0 && end == file.file().bytes;
    bool first = true;
    const auto sink = [&](const HttpReply& reply, std::span<const std::byte> bytes) {
      if (std::exchange(first, false)) {
        require(reply.total_bytes < 0 || reply.total_bytes == file.file().bytes,
                "{}: the hub lists {} bytes and sends {}", url, file.file().bytes,
                reply.total_bytes);
        const bool from_beginning = reply.status != kPartialContent;
        require(from_beginning ? file.n_ranges() == 1 : reply.range_begin == begin,
                "{}: asked for the bytes from {} on, the answer has those from {} on", url, begin,
                reply.range_begin);
        if (from_beginning) file.restart(range);
      }
      require(static_cast<int64_t>(bytes.size()) <= end - file.next(range),
              "{}: the hub sends more bytes than were asked for", url);
      file.write(range, bytes);
      received_ += static_cast<int64_t>(bytes.size());
      return go_on_();
    };
    return connection.get(url, sink, begin, whole ? 0 : end);
  }

  // Fetches the file once more if its digest is wrong: an earlier call may have left bytes that
  // never reached the disk.
  void check(PartialFile& file, HttpConnection& connection) {
    bool right = file.check(go_on_);
    for (int i = 0; !right && i < file.n_ranges(); ++i) file.restart(i);
    for (int i = 0; !right && i < file.n_ranges(); ++i) fetch_range(file, i, connection);
    right = right || file.check(go_on_);
    if (!go_on_()) return;
    if (!right) {
      for (int i = 0; i < file.n_ranges(); ++i) file.restart(i);
      file.save();
      fail("{}: the {} of what the hub sends is not {}, which it lists", file.file().path,
           digest_name(file.file().digest.kind), file.file().digest.hex);
    }
    tell(events_.checked, file.file());
  }

  void put_in_place() {
    for (const PartialFile& file : missing_) checked_.add(file.file(), file.data_path());
    checked_.save();
    for (const bool last : {false, true})
      for (PartialFile& file : missing_)
        if ((file.file().path == kLastFile) == last) file.put_in_place(options_.directory);
  }

  static constexpr int kPartialContent = 206;

  const PullOptions& options_;
  const PullEvents& events_;
  std::vector<HttpConnection>& connections_;
  const HubListing& listing_;
  const std::string folder_;
  const FolderLock lock_;
  CheckedFiles checked_;
  std::list<PartialFile> missing_;
  std::function<bool()> go_on_;
  std::atomic<int64_t> received_ = 0;
};

}  // namespace

PullReport pull(const PullOptions& options, const PullEvents& events) {
  std::vector<HttpConnection> connections;
  for (int i = 0; i < options.n_connections; ++i)
    connections.emplace_back(
        HttpOptions{.token = options.token, .idle_seconds = options.idle_seconds});
  const HubListing listing = only_matching(
      list_repository(connections[0], options.address, options.n_tries), options.include);
  return Pull(options, events, connections, listing).run();
}

}  // namespace tandem
