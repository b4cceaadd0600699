#include "io/load_jobs.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "core/check.h"
#include "core/memory.h"

namespace tandem {
namespace {

constexpr int64_t kPage = 4096;  // also satisfies every disk's alignment for O_DIRECT
// A disk is at full speed with reads of kMaxReadBytes; many threads make up for smaller ones, and
// their buffers should stay small beside the model.
constexpr int64_t kMinReadBytes = 1 << 20, kMaxReadBytes = 4 << 20, kAllReadBytes = 64 << 20;
// Jobs that are read in one go may have a little between them that nobody wants.
constexpr int64_t kMaxGap = 64 << 10;
// Threads beyond one a core, which wait for the disk while the others copy.
constexpr int kMaxWaiting = 16;

// Jobs [first, end) of one file, read together.
struct Piece {
  int file;
  size_t first, end;
  int64_t begin, bytes;  // in the file
};

int64_t round_down(int64_t n) { return n / kPage * kPage; }
int64_t round_up(int64_t n) { return round_down(n + kPage - 1); }

// Jobs in the order of their addresses, to pieces of at most read_bytes (or one job).
std::vector<Piece> cut_into_pieces(std::span<const MappedFile> files,
                                   const std::vector<LoadJob>& jobs, int64_t read_bytes) {
  std::vector<int> by_address(files.size());
  for (size_t i = 0; i < files.size(); ++i) by_address[i] = static_cast<int>(i);
  std::sort(by_address.begin(), by_address.end(),
            [&](int a, int b) { return files[a].data() < files[b].data(); });

  std::vector<Piece> pieces;
  auto file = by_address.begin();
  for (size_t j = 0; j < jobs.size(); ++j) {
    while (file != by_address.end() && files[*file].data() + files[*file].bytes() <= jobs[j].source)
      ++file;
    check(file != by_address.end() && files[*file].contains(jobs[j].source) &&
              jobs[j].bytes <= files[*file].data() + files[*file].bytes() - jobs[j].source,
          "a load job lies outside the files");
    const int64_t begin = jobs[j].source - files[*file].data();
    const int64_t end = begin + jobs[j].bytes;
    if (!pieces.empty()) {
      Piece& last = pieces.back();
      if (last.file == *file && begin - (last.begin + last.bytes) <= kMaxGap &&
          end - last.begin <= read_bytes) {
        last.end = j + 1;
        last.bytes = std::max(last.bytes, end - last.begin);
        continue;
      }
    }
    pieces.push_back({*file, j, j + 1, begin, jobs[j].bytes});
  }
  return pieces;
}

// A second descriptor of the same file that reads past the page cache; -1 where the file system
// cannot.
class DirectFile {
 public:
  explicit DirectFile(const MappedFile& file)
      : fd_(open(fmt::format("/proc/self/fd/{}", file.fd()).c_str(),
                 O_RDONLY | O_CLOEXEC | O_DIRECT)) {}
  DirectFile(DirectFile&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  ~DirectFile() {
    if (fd_ >= 0) close(fd_);
  }

  // `offset`, `bytes` and `out` are whole pages; returns how many bytes were read, fewer than asked
  // at the file's end and where reading failed.
  int64_t read(int64_t offset, int64_t bytes, std::byte* out) const {
    int64_t done = 0;
    while (fd_ >= 0 && done < bytes) {
      const ssize_t n = pread(fd_, out + done, bytes - done, offset + done);
      if (n <= 0) break;
      done += n;
      if (done % kPage != 0) break;
    }
    return done;
  }

 private:
  int fd_;
};

class Loader {
 public:
  Loader(std::span<const MappedFile> files, std::vector<LoadJob> jobs, int n_threads)
      : files_(files),
        jobs_(std::move(jobs)),
        n_workers_(n_threads + std::min(n_threads, kMaxWaiting)) {
    std::sort(jobs_.begin(), jobs_.end(), [](const LoadJob& a, const LoadJob& b) {
      return std::less<const std::byte*>()(a.source, b.source);
    });
    pieces_ = cut_into_pieces(files_, jobs_,
                              std::clamp(kAllReadBytes / n_workers_, kMinReadBytes, kMaxReadBytes));
    for (const MappedFile& file : files_) direct_.emplace_back(file);
    for (const LoadJob& job : jobs_) bytes_total_ += job.bytes;
    for (const Piece& piece : pieces_)
      scratch_bytes_ = std::max(scratch_bytes_, round_up(piece.bytes) + 2 * kPage);
  }

  void run(const std::function<void(int64_t, int64_t, double)>& progress) {
    const auto start = std::chrono::steady_clock::now();
    const auto report = [&] {
      const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
      if (progress) progress(bytes_done_, bytes_total_, spent.count());
    };
    n_running_ = static_cast<int>(std::min<size_t>(n_workers_, pieces_.size()));
    std::vector<std::jthread> workers;
    for (int i = n_running_; i > 0; --i) workers.emplace_back([this] { work(); });
    try {
      std::unique_lock lock(mutex_);
      while (
          !idle_.wait_for(lock, std::chrono::milliseconds(100), [&] { return n_running_ == 0; })) {
        lock.unlock();
        report();
        lock.lock();
      }
    } catch (...) {
      stop(std::current_exception());
    }
    workers.clear();
    if (error_) std::rethrow_exception(error_);
    report();
  }

 private:
  void work() {
    try {
      const Buffer scratch(scratch_bytes_);
      for (size_t i = next_++; i < pieces_.size() && !stopped_; i = next_++)
        run_piece(pieces_[i], scratch.data());
    } catch (...) {
      stop(std::current_exception());
    }
    const std::lock_guard lock(mutex_);
    if (--n_running_ == 0) idle_.notify_one();
  }

  void run_piece(const Piece& piece, std::byte* scratch) {
    const MappedFile& file = files_[piece.file];
    const int64_t page = round_down(piece.begin);
    const int64_t end = round_up(piece.begin + piece.bytes);
    const int64_t read =
        mostly_cached(piece) ? 0 : direct_[piece.file].read(page, end - page, scratch);
    for (size_t j = piece.first; j < piece.end && !stopped_; ++j) {
      const LoadJob& job = jobs_[j];
      const int64_t begin = job.source - file.data();
      // Of a piece in the page cache every job takes the same, warm beginning of the buffer.
      std::byte* const data = read > 0 ? scratch + (begin - page) : scratch;
      if (begin + job.bytes > page + read) file.read(begin, {data, static_cast<size_t>(job.bytes)});
      job.run(data);
      bytes_done_ += job.bytes;
    }
  }

  // What the kernel will not tell counts as cached: read through the page cache then.
  bool mostly_cached(const Piece& piece) const {
    const int64_t page = round_down(piece.begin);
    const int64_t n_pages = (round_up(piece.begin + piece.bytes) - page) / kPage;
    std::vector<unsigned char> resident(n_pages);
    std::byte* const address = const_cast<std::byte*>(files_[piece.file].data()) + page;
    if (mincore(address, piece.begin + piece.bytes - page, resident.data()) != 0) return true;
    return 2 * std::count_if(resident.begin(), resident.end(), [](int r) { return r & 1; }) >=
           n_pages;
  }

  void stop(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = std::move(error);
    stopped_ = true;
  }

  const std::span<const MappedFile> files_;
  std::vector<LoadJob> jobs_;  // by address
  const int n_workers_;
  std::vector<Piece> pieces_;
  std::vector<DirectFile> direct_;  // of files_
  int64_t bytes_total_ = 0, scratch_bytes_ = 0;

  std::atomic<size_t> next_ = 0;
  std::atomic<int64_t> bytes_done_ = 0;
  std::atomic<bool> stopped_ = false;
  std::mutex mutex_;
  std::condition_variable idle_;
  int n_running_ = 0;
  std::exception_ptr error_;
};

std::string time_left(double seconds) {
  const auto s = static_cast<int64_t>(std::min(seconds, 359999.0) + 0.5);
  if (s < 60) return fmt::format("{} s left", s);
  if (s < 3600) return fmt::format("{}:{:02} min left", s / 60, s % 60);
  return fmt::format("{}:{:02} h left", s / 3600, s / 60 % 60);
}

}  // namespace

void run_load_jobs(std::span<const MappedFile> files, std::vector<LoadJob> jobs,
                   const LoadOptions& options) {
  check(options.n_threads > 0, "run_load_jobs needs a thread");
  for (const MappedFile& file : files) file.require_unchanged();
  Loader(files, std::move(jobs), options.n_threads).run(options.progress);
}

std::string progress_line(int64_t bytes_done, int64_t bytes_total, double seconds) {
  constexpr int kBarWidth = 16;
  const double done = static_cast<double>(bytes_done);
  const double total = static_cast<double>(std::max<int64_t>(bytes_total, 1));
  const double share = std::clamp(done / total, 0.0, 1.0);
  const double rate = seconds > 0 ? done / seconds : 0;
  const int digits = total < 100e9 ? 2 : 1;

  const int full = static_cast<int>(share * kBarWidth);
  std::string line = "loading ";
  for (int i = 0; i < kBarWidth; ++i) line += i < full ? "█" : "░";
  line += fmt::format(" {:3} % {:.{}f} of {:.{}f} GB {:5.2f} GB/s", static_cast<int>(share * 100),
                      done * 1e-9, digits, total * 1e-9, digits, rate * 1e-9);
  if (rate > 0) line += "  " + time_left((total - done) / rate);
  return line;
}

}  // namespace tandem
