#include "loader/weights/load_weights.h"

#include <sys/resource.h>

#include "core/clock.h"
#include "io/packed_cache.h"
#include "loader/weights/pack_weights.h"
#include "model/checkpoint.h"

namespace tandem {
namespace {

class WeightLoader {
 public:
  WeightLoader(const WeightStore& store, ModelWeights& stored, const ModelConfig& config,
               const LoadPlan& plan, CpuWeights& home)
      : store_(store), stored_(stored), config_(config), plan_(plan), home_(home) {
    const std::string& directory = plan.cache_directory;
    require(
        !directory.empty() || plan.cache_use != CacheUse::kRequire,
        "neither XDG_CACHE_HOME nor HOME is set: name a folder for the packed cache with --cache");
    slices_ = expert_slices(stored, config, home, plan.layout.experts);
    if (directory.empty()) return;
    remove_stale_packed_files(directory);
    path_ = packed_cache_path(directory, store.directory(), plan.layout);
  }

  LoadedWeights load() {
    const Cache found = path_.empty() ? Cache::kNone : read_cache();
    if (found == Cache::kRead) return std::move(loaded_);
    const bool writes =
        found == Cache::kUnsound || (!path_.empty() && plan_.cache_use != CacheUse::kRead);
    // Computed before packing: a checkpoint that changes during packing then has another key.
    const std::string key =
        writes ? packed_cache_key(store_, plan_.layout, slices_) : std::string();
    pack();
    if (writes) write_cache(key);
    return std::move(loaded_);
  }

 private:
  enum class Cache { kNone, kUnsound, kRead };

  Cache read_cache() {
    const Clock::time_point start = Clock::now();
    std::optional<PackedFile> file;
    try {
      file = PackedFile::open(path_);
      if (!file) return Cache::kNone;
      file->read_header(packed_cache_key(store_, plan_.layout, slices_));
      allocate_for(file->manifest(), file->data_bytes(), home_);
      loaded_.weights = weights_of(file->manifest(), config_, slices_, home_,
                                   plan_.layout.kernels.layout, plan_.layout.experts);
      file->read(home_.bytes().data(), {plan_.n_threads, plan_.progress});
    } catch (const PackedError& error) {
      if (file) file->discard();
      plan_.warn(fmt::format("the packed cache {} is not used: {}; packing the checkpoint again",
                             path_, error.what()));
      return Cache::kUnsound;
    }
    loaded_.report = {.seconds = seconds_since(start),
                      .bytes = file->data_bytes(),
                      .cache = path_,
                      .from_cache = true};
    return Cache::kRead;
  }

  void pack() {
    store_.require_unchanged();
    for (const std::string& line : checkpoint_warnings(stored_)) plan_.warn(line);
    const PackedModel packed = reserve_packed(stored_, config_, home_, plan_.layout.experts);
    PackJobs jobs = load_jobs(packed, home_);
    add_shape_jobs(jobs.first);
    const int64_t first_bytes = bytes_of(jobs.first);
    loaded_.report.bytes = first_bytes + bytes_of(jobs.rest);
    const Clock::time_point start = Clock::now();
    run(std::move(jobs.first), 0, start);
    run(std::move(jobs.rest), first_bytes, start);
    loaded_.report.seconds = seconds_since(start);
    loaded_.weights = packed.weights;
  }

  // Checks the shapes that checkpoints store with packed INT4.
  void add_shape_jobs(std::vector<LoadJob>& jobs) const {
    for_each_weight(stored_, config_, [&](const WeightSpec& spec, const QuantView&) {
      if (spec.group == 0) return;
      const StoredTensor& shape = *store_.find(spec.name + kInt4Parts[2]);
      jobs.push_back({shape.data, shape.bytes,
                      [&shape, rows = spec.rows, cols = spec.cols](const std::byte* data) {
                        check_int4_shape(shape, data, rows, cols);
                      }});
    });
  }

  static int64_t bytes_of(const std::vector<LoadJob>& jobs) {
    int64_t bytes = 0;
    for (const LoadJob& job : jobs) bytes += job.bytes;
    return bytes;
  }

  // Runs jobs that follow others, which read `bytes_before`.
  void run(std::vector<LoadJob> jobs, int64_t bytes_before, Clock::time_point start) const {
    if (jobs.empty()) return;
    LoadProgress progress;
    if (plan_.progress)
      progress = [&](int64_t done, int64_t, double) {
        plan_.progress(bytes_before + done, loaded_.report.bytes, seconds_since(start));
      };
    run_load_jobs(store_.files(), std::move(jobs), {plan_.n_threads, progress});
  }

  void write_cache(const std::string& key) {
    const Clock::time_point start = Clock::now();
    try {
      const std::string manifest =
          manifest_of(loaded_.weights, config_, home_, plan_.layout.experts);
      write_packed_file(path_, {key, manifest, home_.bytes()},
                        {plan_.n_threads, plan_.write_progress});
    } catch (const Error& error) {
      if (plan_.cache_use == CacheUse::kRequire) throw;
      return plan_.warn(fmt::format("no packed cache is written: {}", error.what()));
    }
    loaded_.report.cache = path_;
    loaded_.report.write_seconds = seconds_since(start);
  }

  const WeightStore& store_;
  ModelWeights& stored_;
  const ModelConfig& config_;
  const LoadPlan& plan_;
  CpuWeights& home_;
  std::vector<Slice> slices_;  // slices of the experts
  std::string path_;           // path of the packed cache; empty: none
  LoadedWeights loaded_;
};

}  // namespace

LoadedWeights load_weights(const WeightStore& store, ModelWeights& stored,
                           const ModelConfig& config, const LoadPlan& plan, CpuWeights& home) {
  return WeightLoader(store, stored, config, plan, home).load();
}

void load_beside_steps() {
  constexpr int kNiceness = 10;
  setpriority(PRIO_PROCESS, 0, kNiceness);
}

}  // namespace tandem
