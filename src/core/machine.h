// A machine as data: what a planner must know of the place where a model will run. Measured by
// `tandem bench machine`, or read from a file of machines/ (io/machine_json.h).
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace tandem {

// Operations per second, a multiplication and an addition are two; 0: no instruction of its own,
// numbers are widened to the next type.
struct PeakRates {
  double fp32 = 0, bf16 = 0, fp8 = 0, int8 = 0;
};

struct NumaNode {
  int cores;
  int64_t memory_bytes;
  double read_bytes_per_second;  // of its own memory by its own cores
};

struct Gpu {
  std::string name;
  int64_t memory_bytes;
  double read_bytes_per_second;
  PeakRates peak;                                     // without sparsity
  double h2d_bytes_per_second, d2h_bytes_per_second;  // pinned host memory
  double h2d_pageable_bytes_per_second, d2h_pageable_bytes_per_second;
};

// One direction of one end. Zero: there is none.
struct Link {
  double bytes_per_second = 0;
  double latency_seconds = 0;
};

// How fast one kind of work on the CPUs is, as `tandem bench` measured it: pairs of x, ascending,
// and the time of reading and arithmetic, one after the other, over the time it takes. At most 2:
// two equal ones, one hidden behind the other.
constexpr double kMostEfficiency = 2;
struct EfficiencyCurve {
  std::string work;    // experts, dense: x are rows of activations; absorbed, restored: attention,
                       // x are tokens in the cache
  std::string format;  // fp8, bf16, int8, int4 or int4-bf16; of attention: empty
  std::vector<std::pair<double, double>> points;  // at least one
};

struct Machine {
  std::string name;
  std::string cpu;
  std::string isa;  // reference, avx2, avx512 or amx
  int sockets = 1;
  std::vector<NumaNode> nodes;                  // of one host, at least one
  double one_thread_read_bytes_per_second = 0;  // own node
  double cross_read_bytes_per_second = 0;       // one node's cores, another's memory; 1 node: 0
  PeakRates peak;                               // of all cores of one host
  std::vector<EfficiencyCurve> curves;          // for the rest the planner has its own
  double disk_read_bytes_per_second = 0;        // 0: unknown
  std::vector<Gpu> gpus;                        // of one host, all alike
  int n_unmeasured_gpus = 0;                    // that are there, but of which no rate is known
  Link gpu_link;                                // of a GPU to the others of its host
  int hosts = 1;                                // all alike
  Link network;                                 // of a host
  int64_t measured_at = 0;                      // seconds since 1970; 0: not measured but described

  int cores() const;
  int64_t memory_bytes() const;
  double read_bytes_per_second() const;  // all nodes, each its own memory
  int n_gpus() const { return static_cast<int>(gpus.size()) * hosts; }
};

}  // namespace tandem
