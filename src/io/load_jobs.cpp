#include "io/load_jobs.h"

#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <utility>

#include "core/check.h"
#include "core/memory.h"
#include "io/direct_file.h"
#include "io/workers.h"

namespace tandem {
namespace {

// One disk reaches full speed with reads of kMaxReadBytes. Many threads reach it with smaller
// reads, and all their buffers together should stay small compared with the model.
constexpr int64_t kMinReadBytes = 1 << 20, kMaxReadBytes = 4 << 20, kAllReadBytes = 64 << 20;
// Jobs are read together if at most this many unused bytes lie between them.
constexpr int64_t kMaxGap = 64 << 10;
// Maximum number of threads beyond one per core; they wait for the disk while others copy.
constexpr int kMaxWaiting = 16;

// Jobs [first, end) of one file, read together.
struct Piece {
  int file;
  size_t first, end;
  int64_t begin, bytes;  // in the file
};

// Groups jobs, sorted by address, into pieces of at most read_bytes; a larger job is a piece of its
// own.
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

class Loader {
 public:
  Loader(std::span<const MappedFile> files, std::vector<LoadJob> jobs, int n_threads)
      : files_(files), jobs_(std::move(jobs)), n_workers_(load_workers(n_threads)) {
    std::sort(jobs_.begin(), jobs_.end(), [](const LoadJob& a, const LoadJob& b) {
      return std::less<const std::byte*>()(a.source, b.source);
    });
    pieces_ = cut_into_pieces(files_, jobs_, load_read_bytes(n_workers_));
    for (const MappedFile& file : files_) direct_.emplace_back(file.fd(), O_RDONLY);
    for (const LoadJob& job : jobs_) bytes_total_ += job.bytes;
    for (const Piece& piece : pieces_)
      scratch_bytes_ = std::max(scratch_bytes_, disk_page_up(piece.bytes) + 2 * kDiskPage);
    scratch_.resize(n_workers_);
  }

  void run(const LoadProgress& progress) {
    workers_.run(
        n_workers_, static_cast<int64_t>(pieces_.size()),
        [this](int64_t i, int worker) {
          if (scratch_[worker].bytes() == 0) scratch_[worker] = Buffer(scratch_bytes_);
          run_piece(pieces_[i], scratch_[worker].data());
        },
        [&](double seconds) {
          if (progress) progress(bytes_done_, bytes_total_, seconds);
        });
  }

 private:
  void run_piece(const Piece& piece, std::byte* scratch) {
    const MappedFile& file = files_[piece.file];
    const int64_t page = disk_page_down(piece.begin);
    const int64_t end = disk_page_up(piece.begin + piece.bytes);
    const int64_t read = mostly_cached(file, piece.begin, piece.bytes)
                             ? 0
                             : direct_[piece.file].read(page, end - page, scratch);
    for (size_t j = piece.first; j < piece.end && !workers_.stopped(); ++j) {
      const LoadJob& job = jobs_[j];
      const int64_t begin = job.source - file.data();
      // Jobs of a cached piece are copied one by one to the beginning of the buffer, which stays in
      // the core's cache.
      std::byte* const data = read > 0 ? scratch + (begin - page) : scratch;
      if (begin + job.bytes > page + read) file.read(begin, {data, static_cast<size_t>(job.bytes)});
      job.run(data);
      bytes_done_ += job.bytes;
    }
  }

  const std::span<const MappedFile> files_;
  std::vector<LoadJob> jobs_;  // sorted by address
  const int n_workers_;
  std::vector<Piece> pieces_;
  std::vector<DirectFile> direct_;  // [files_]
  std::vector<Buffer> scratch_;     // [workers]
  int64_t bytes_total_ = 0, scratch_bytes_ = 0;
  std::atomic<int64_t> bytes_done_ = 0;
  Workers workers_;
};

std::string time_left(double seconds) {
  const auto s = int64_t{std::lround(std::min(seconds, 359999.0))};
  if (s < 60) return fmt::format("{} s left", s);
  if (s < 3600) return fmt::format("{}:{:02} min left", s / 60, s % 60);
  return fmt::format("{}:{:02} h left", s / 3600, s / 60 % 60);
}

}  // namespace

int load_workers(int n_threads) { return n_threads + std::min(n_threads, kMaxWaiting); }

int64_t load_read_bytes(int n_workers) {
  return std::clamp(kAllReadBytes / n_workers, kMinReadBytes, kMaxReadBytes);
}

void run_load_jobs(std::span<const MappedFile> files, std::vector<LoadJob> jobs,
                   const LoadOptions& options) {
  check(options.n_threads > 0, "run_load_jobs needs a thread");
  for (const MappedFile& file : files) file.require_unchanged();
  Loader(files, std::move(jobs), options.n_threads).run(options.progress);
}

std::string progress_line(int64_t bytes_done, int64_t bytes_total, double seconds,
                          std::string_view what, int64_t bytes_before) {
  constexpr int kBarWidth = 16;
  const double done = static_cast<double>(bytes_done);
  const double total = static_cast<double>(std::max<int64_t>(bytes_total, 1));
  const double share = std::clamp(done / total, 0.0, 1.0);
  const double rate = seconds > 0 ? (done - static_cast<double>(bytes_before)) / seconds : 0;
  const int digits = total < 100e9 ? 2 : 1;

  const int full = static_cast<int>(share * kBarWidth);
  std::string line = std::string(what) + " ";
  for (int i = 0; i < kBarWidth; ++i) line += i < full ? "█" : "░";
  line += fmt::format(" {:3} % {:.{}f} of {:.{}f} GB {}", static_cast<int>(share * 100),
                      done * 1e-9, digits, total * 1e-9, digits,
                      rate > 0 && rate < 0.1e9 ? fmt::format("{:5.2f} MB/s", rate * 1e-6)
                                               : fmt::format("{:5.2f} GB/s", rate * 1e-9));
  if (rate > 0) line += "  " + time_left((total - done) / rate);
  return line;
}

}  // namespace tandem
