// Loading against plain parallel reads of the same files, with the files in the page cache and
// without, and how long a checkpoint of R1's size takes to open.
//   load_bench [GB] [DIRECTORY]     GB of files are written there and removed again
#include <fcntl.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>

#include "core/memory.h"
#include "inspect.h"
#include "io/load_jobs.h"
#include "io/weight_store.h"
#include "tests/fake_checkpoint.h"

namespace tandem {
namespace {

constexpr int kRounds = 11, kFiles = 4;
constexpr int64_t kRowBytes = 7168, kPlainBytes = 1 << 20;

double seconds_of(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

void write_random_file(const std::string& path, int number, int64_t bytes) {
  FakeTensor tensor{
      fmt::format("model.layers.{}.weight", number), "F8_E4M3", {bytes / kRowBytes, kRowBytes}};
  tensor.data.resize(tensor.bytes());
  std::mt19937_64 random(number);
  for (int64_t at = 0; at + 8 <= tensor.bytes(); at += 8) {
    const uint64_t value = random();
    std::memcpy(tensor.data.data() + at, &value, 8);
  }
  write_safetensors(path, {tensor});
}

// All bytes of all files by `n_threads`, kPlainBytes at a time, to `out`, or to a small buffer of
// each thread if that is nullptr.
void read_plainly(std::span<const MappedFile> files, int n_threads, std::byte* out) {
  std::vector<std::pair<int, int64_t>> pieces;
  std::vector<int64_t> first_byte;
  int64_t total = 0;
  for (size_t f = 0; f < files.size(); ++f) {
    first_byte.push_back(total);
    total += files[f].bytes();
    for (int64_t at = 0; at < files[f].bytes(); at += kPlainBytes) pieces.emplace_back(f, at);
  }
  std::atomic<size_t> next = 0;
  const auto work = [&] {
    std::vector<std::byte> small(kPlainBytes);
    for (size_t i = next++; i < pieces.size(); i = next++) {
      const auto [f, at] = pieces[i];
      const int64_t bytes = std::min(kPlainBytes, files[f].bytes() - at);
      files[f].read(at,
                    {out ? out + first_byte[f] + at : small.data(), static_cast<size_t>(bytes)});
    }
  };
  std::vector<std::jthread> threads;
  for (int t = 0; t < n_threads; ++t) threads.emplace_back(work);
}

void load(const WeightStore& store, int n_threads, std::byte* out) {
  std::vector<LoadJob> jobs;
  for (const StoredTensor& t : store.tensors()) {
    const int64_t rows = rows_per_load_job(kRowBytes);
    for (int64_t r = 0; r < t.shape[0]; r += rows) {
      const int64_t bytes = std::min(rows, t.shape[0] - r) * kRowBytes;
      std::byte* to = out + r * kRowBytes;
      jobs.push_back({t.data + r * kRowBytes, bytes,
                      [to, bytes](const std::byte* data) { std::memcpy(to, data, bytes); }});
    }
    out += t.bytes;
  }
  run_load_jobs(store.files(), std::move(jobs), {.n_threads = n_threads});
}

void prepare(std::span<const MappedFile> files, bool cached) {
  for (const MappedFile& file : files) posix_fadvise(file.fd(), 0, 0, POSIX_FADV_DONTNEED);
  if (cached) read_plainly(files, 1, nullptr);
}

void compare(const WeightStore& store, int n_threads, std::byte* out, bool cached) {
  const double gb = static_cast<double>(store.total_bytes()) * 1e-9;
  const std::function<void()> ways[] = {
      [&] { read_plainly(store.files(), n_threads, nullptr); },
      [&] { read_plainly(store.files(), n_threads, out); },
      [&] { load(store, n_threads, out); },
  };
  std::vector<double> rates[3];
  for (int turn = 0; turn < 3 * kRounds; ++turn) {
    const int way = (turn + turn / 3) % 3;  // each goes first as often as the others
    prepare(store.files(), cached);
    rates[way].push_back(gb / seconds_of(ways[way]));
  }
  fmt::print("{:<12} {:>10.2f} {:>14.2f} {:>10.2f} {:>10.2f}\n", cached ? "page cache" : "disk",
             median(rates[0]), median(rates[1]), median(rates[2]),
             median(rates[2]) / median(rates[1]));
}

int64_t resident_bytes(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;)
    if (int64_t kib = 0; word == field + ":" && status >> kib) return kib * 1024;
  return 0;
}

// The peak while weights go to memory that was not touched before, over their bytes.
double resident_ratio(const WeightStore& store, int n_threads) {
  std::ofstream("/proc/self/clear_refs") << 5;  // the peak starts anew
  const int64_t before = resident_bytes("VmRSS");
  const Buffer out(store.total_bytes());
  load(store, n_threads, out.data());
  return static_cast<double>(resident_bytes("VmHWM") - before) / store.total_bytes();
}

void load_speed(double gb, const std::string& parent) {
  const TempDirectory directory(parent);
  for (int i = 0; i < kFiles; ++i)
    write_random_file(directory.file(fmt::format("part-{}.safetensors", i)), i,
                      static_cast<int64_t>(gb * 1e9) / kFiles);
  sync();
  const WeightStore store(directory.path());
  const int n_threads = static_cast<int>(std::thread::hardware_concurrency());
  fmt::print("GB/s of {} threads, {:.2f} GB in {} files, medians of {} rounds\n", n_threads,
             static_cast<double>(store.total_bytes()) * 1e-9, kFiles, kRounds);
  fmt::print("{:<12} {:>10} {:>14} {:>10} {:>10}\n", "from", "plain, to", "plain, to", "loaded",
             "loaded /");
  fmt::print("{:<12} {:>10} {:>14} {:>10} {:>10}\n", "", "a buffer", "all its memory", "", "plain");
  const double resident = resident_ratio(store, n_threads);
  {
    const Buffer out(store.total_bytes() + kFiles * kPlainBytes);  // plain reads bring headers too
    std::memset(out.data(), 1, out.bytes());
    compare(store, n_threads, out.data(), true);
    compare(store, n_threads, out.data(), false);
  }
  fmt::print("resident memory at its peak while loading: {:.4f} x the bytes of the weights\n",
             resident);
}

void open_speed(const std::string& parent) {
  const TempDirectory directory(parent);
  const ModelConfig r1;
  write_checkpoint(directory.path(), tensors_of(r1), 163);
  std::vector<double> times;
  size_t n_tensors = 0;
  for (int round = 0; round < kRounds; ++round)
    times.push_back(seconds_of([&] {
      const WeightStore store(directory.path());
      n_tensors = store.tensors().size();
      inspect_report(r1, store);
    }));
  fmt::print(
      "a checkpoint of R1's size ({} tensors in 163 files) opens and is inspected in {:.3f} s\n",
      n_tensors, median(times));
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  const double gb = argc > 1 ? std::stod(argv[1]) : 2;
  const std::string parent = argc > 2 ? argv[2] : std::filesystem::temp_directory_path().string();
  tandem::load_speed(gb, parent);
  tandem::open_speed(parent);
}
