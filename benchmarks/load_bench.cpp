// Loading against plain parallel reads of the same files, from the checkpoint with packing and from
// the packed cache, in the page cache and on disk; and how long a checkpoint of R1's size takes to
// open.
//   load_bench [GB] [DIRECTORY]     GB of files are written there and removed again
#include <fcntl.h>

#include <atomic>
#include <cstring>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "cli/inspect.h"
#include "core/clock.h"
#include "io/load_jobs.h"
#include "io/packed_cache.h"
#include "io/weight_store.h"
#include "ops/cpu_weights.h"
#include "tests/fake_checkpoint.h"

namespace tandem {
namespace {

constexpr int kRounds = 9, kFiles = 4;
constexpr int64_t kRowBytes = 7168, kPlainBytes = 1 << 20;
constexpr int64_t kRoom = 4 << 20;  // plain reads bring headers too

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

// What a start does, on one pair of memory and files.
struct Ways {
  const WeightStore& store;
  const std::string packed_path;
  const int n_threads = static_cast<int>(std::thread::hardware_concurrency());
  const cpu::KernelTable kernels = cpu::kernels_for(cpu::best_isa());
  CpuWeights home{kernels};
  std::vector<QuantView> packed = {};

  void reserve() {
    const auto view = [](const StoredTensor& t) {
      return QuantView{
          .q = {const_cast<std::byte*>(t.data), t.shape[0], kRowBytes, kRowBytes, DType::kF8E4M3},
          .scale = {}};
    };
    int64_t bytes = kRoom;
    for (const StoredTensor& t : store.tensors()) bytes += home.packed_bytes(view(t));
    home.allocate(bytes);
    packed.clear();
    for (const StoredTensor& t : store.tensors()) packed.push_back(home.reserve(view(t)));
  }
  void pack() {
    std::vector<LoadJob> jobs;
    const int64_t rows = rows_per_load_job(kRowBytes) / kPackRows * kPackRows;
    for (size_t i = 0; i < packed.size(); ++i) {
      const StoredTensor& t = store.tensors()[i];
      for (int64_t r = 0; r < t.shape[0]; r += rows) {
        const int64_t n = std::min(rows, t.shape[0] - r);
        jobs.push_back(
            {t.data + r * kRowBytes, n * kRowBytes,
             [this, i, r, n](const std::byte* data) { home.pack(data, packed[i], r, n); }});
      }
    }
    run_load_jobs(store.files(), std::move(jobs), {.n_threads = n_threads});
  }
  void write_cache() const {
    write_packed_file(packed_path, {"benchmark\n", "", home.bytes()}, {.n_threads = n_threads});
  }
  void read_cache() const {
    auto file = PackedFile::open(packed_path);
    file->read_header("benchmark\n");
    file->read(home.bytes().data(), {.n_threads = n_threads});
  }
  void read_files_plainly() const { read_plainly(store.files(), n_threads, home.bytes().data()); }
  void read_cache_plainly() const {
    const MappedFile file(packed_path);
    read_plainly({&file, 1}, n_threads, home.bytes().data());
  }
};

void prepare(std::span<const MappedFile> files, bool cached) {
  for (const MappedFile& file : files) posix_fadvise(file.fd(), 0, 0, POSIX_FADV_DONTNEED);
  if (cached) read_plainly(files, 1, nullptr);
}

// `fresh`: memory that was not touched before, as at a start.
void compare(Ways& ways, bool cached, bool fresh) {
  const double gb = static_cast<double>(ways.store.total_bytes()) * 1e-9;
  void (*const works[])(Ways&) = {
      [](Ways& w) { w.read_files_plainly(); },
      [](Ways& w) { w.pack(); },
      [](Ways& w) { w.read_cache_plainly(); },
      [](Ways& w) { w.read_cache(); },
  };
  const MappedFile packed_file(ways.packed_path);
  std::vector<double> rates[4];
  for (int turn = 0; turn < 4 * kRounds; ++turn) {
    const int way = (turn + turn / 4) % 4;  // each goes first as often as the others
    prepare(way < 2 ? ways.store.files() : std::span(&packed_file, 1), cached);
    if (fresh) ways.reserve();
    rates[way].push_back(gb / seconds_of([&] { works[way](ways); }));
  }
  double m[4];
  for (int i = 0; i < 4; ++i) m[i] = median(rates[i]);
  fmt::print("{:<10} {:<8} {:>9.2f} {:>9.2f} {:>6.2f} {:>12.2f} {:>9.2f} {:>6.2f}\n",
             cached ? "page cache" : "disk", fresh ? "fresh" : "touched", m[0], m[1], m[1] / m[0],
             m[2], m[3], m[3] / m[2]);
}

int64_t resident_bytes(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;)
    if (int64_t kib = 0; word == field + ":" && status >> kib) return kib * 1024;
  return 0;
}

// The peak while weights go to memory that was not touched before, over their bytes.
double resident_ratio(Ways& ways, const std::function<void()>& load) {
  ways.home.allocate(0);
  std::ofstream("/proc/self/clear_refs") << 5;  // the peak starts anew
  const int64_t before = resident_bytes("VmRSS");
  ways.reserve();
  load();
  return static_cast<double>(resident_bytes("VmHWM") - before) / ways.store.total_bytes();
}

void load_speed(double gb, const std::string& parent) {
  const TempDirectory directory(parent);
  const std::string model = directory.file("model");
  std::filesystem::create_directory(model);
  for (int i = 0; i < kFiles; ++i)
    write_random_file(fmt::format("{}/part-{}.safetensors", model, i), i,
                      static_cast<int64_t>(gb * 1e9) / kFiles);
  sync();
  const WeightStore store(model);
  Ways ways{store, directory.file("model.tandempack")};
  const double packed_from_files = resident_ratio(ways, [&] { ways.pack(); });
  const double write_seconds = seconds_of([&] { ways.write_cache(); });
  const double packed_from_cache = resident_ratio(ways, [&] { ways.read_cache(); });

  fmt::print("GB/s of {} threads, {:.2f} GB in {} files, medians of {} rounds, {} kernels\n",
             ways.n_threads, static_cast<double>(store.total_bytes()) * 1e-9, kFiles, kRounds,
             ways.kernels.name);
  fmt::print("{:<10} {:<8} {:>9} {:>9} {:>6} {:>12} {:>9} {:>6}\n", "", "", "files", "files", "",
             "packed file", "packed", "");
  fmt::print("{:<10} {:<8} {:>9} {:>9} {:>6} {:>12} {:>9} {:>6}\n", "from", "memory", "plainly",
             "packed", "ratio", "plainly", "start", "ratio");
  compare(ways, true, false);
  compare(ways, true, true);
  compare(ways, false, true);
  fmt::print("the packed cache is written at {:.2f} GB/s\n",
             static_cast<double>(store.total_bytes()) * 1e-9 / write_seconds);
  fmt::print(
      "resident memory at its peak, x the bytes of the weights: {:.4f} from the files, {:.4f} from "
      "the packed cache\n",
      packed_from_files, packed_from_cache);
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
