#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <random>
#include <thread>
#include <vector>

#include "bench/machine/machine_report.h"
#include "core/check.h"
#include "core/clock.h"
#include "core/memory.h"
#include "io/direct_file.h"
#include "io/load_jobs.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> files_of(const std::string& path);
double read_rate(const std::vector<std::string>& paths, int n_threads, double seconds);
bool write_file(const std::string& path, int64_t bytes);

}  // namespace

DiskSpeed speed_of_files(const std::string& path, int n_threads, double seconds) {
  const double rate = read_rate(files_of(path), n_threads, seconds);
  if (rate > 0) return {rate, path};
  return {0, fmt::format("{}: its file system reads nothing past the page cache", path)};
}

DiskSpeed speed_of_folder(const std::string& folder, int64_t bytes, int n_threads, double seconds) {
  std::error_code ignored;
  fs::create_directories(folder, ignored);
  const std::string path = fmt::format("{}/disk-{}.partial", folder, getpid());
  const bool written = write_file(path, bytes);
  const double rate = written ? read_rate({path}, n_threads, seconds) : 0;
  fs::remove(path, ignored);
  if (rate > 0)
    return {rate, fmt::format("a file of {:.0f} MB, written for that, in {}",
                              static_cast<double>(bytes) * 1e-6, folder)};
  return {0, fmt::format("{}: {}", folder,
                         written ? "its file system reads nothing past the page cache"
                                 : "a file to measure with cannot be written there")};
}

namespace {

std::vector<std::string> files_of(const std::string& path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) return {path};
  std::vector<std::string> files;
  for (const auto& entry : fs::directory_iterator(path, error))
    if (entry.path().extension() == ".safetensors") files.push_back(entry.path().string());
  require(!files.empty(), "{}: no *.safetensors to read: name a model directory or a file", path);
  std::sort(files.begin(), files.end());
  return files;
}

// Reads all files repeatedly, with the threads and read sizes of model loading; 0 if the page cache
// cannot be bypassed.
double read_rate(const std::vector<std::string>& paths, int n_threads, double seconds) {
  struct Piece {
    const DirectFile* file;
    int64_t begin, bytes;
  };
  std::vector<MappedFile> files;
  std::vector<DirectFile> direct;
  std::vector<Piece> pieces;
  const int n_workers = load_workers(n_threads);
  const int64_t most = load_read_bytes(n_workers);
  direct.reserve(paths.size());
  for (const std::string& path : paths) {
    files.emplace_back(path);
    direct.emplace_back(files.back().fd(), O_RDONLY);
    for (int64_t at = 0; at < files.back().bytes(); at += most)
      pieces.push_back({&direct.back(), at, std::min(most, files.back().bytes() - at)});
  }
  if (pieces.empty()) return 0;
  std::atomic<int64_t> next = 0, bytes = 0;
  std::vector<std::thread> threads;
  threads.reserve(n_workers);
  const Stopwatch watch;
  for (int t = 0; t < n_workers; ++t)
    threads.emplace_back([&] {
      const Buffer room(disk_page_up(most));
      do {
        const Piece& piece = pieces[next++ % std::ssize(pieces)];
        const int64_t n = piece.file->read(piece.begin, disk_page_up(piece.bytes), room.data());
        if (n == 0) return;
        bytes += n;
      } while (watch.seconds() < seconds);
    });
  for (std::thread& thread : threads) thread.join();
  return static_cast<double>(bytes) / watch.seconds();
}

// Writes numbers that no disk can compress; they are on the disk when this returns.
bool write_file(const std::string& path, int64_t bytes) {
  const int fd = open(path.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
  if (fd < 0) return false;
  std::vector<uint64_t> block(1 << 17);
  std::mt19937_64 random(1);
  bool good = true;
  for (int64_t at = 0; at < bytes && good;) {
    std::generate(block.begin(), block.end(), std::ref(random));
    const int64_t n = std::min<int64_t>(bytes - at, std::ssize(block) * 8);
    good = ::write(fd, block.data(), n) == n;
    at += n;
  }
  good &= fsync(fd) == 0;
  close(fd);
  return good;
}

}  // namespace
}  // namespace tandem
