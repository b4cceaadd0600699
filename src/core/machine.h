// A machine as data: what the planner needs to know about the hardware a model will run on.
// Measured by `tandem bench machine`, or read from a file of machines/ (io/machine_json.h).
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace tandem {

// Operations per second; a multiply-add counts as two. 0: the hardware has no instruction for the
// type, and numbers are widened to the next type.
struct PeakRates {
  double fp32 = 0, bf16 = 0, fp8 = 0, int8 = 0;
};

struct NumaNode {
  int cores;
  int64_t memory_bytes;
  double read_bytes_per_second;  // its own cores reading its own memory
};

struct Gpu {
  std::string name;
  int64_t memory_bytes;
  double read_bytes_per_second;
  PeakRates peak;                                     // without sparsity
  double h2d_bytes_per_second, d2h_bytes_per_second;  // from and to pinned host memory
  double h2d_pageable_bytes_per_second, d2h_pageable_bytes_per_second;
  // Dense BF16 with float sums by the data sheet, where `peak` was measured; 0: not known.
  double datasheet_bf16_ops_per_second = 0;
};

// One direction of one endpoint's connection. Zeros: there is no link.
struct Link {
  double bytes_per_second = 0;
  double latency_seconds = 0;
};

// Efficiency of one kind of work on the CPUs, measured by `tandem bench`: pairs (x, efficiency), x
// ascending. Efficiency is the computed time of reading plus arithmetic divided by the measured
// time. It is at most 2: both take equally long and overlap completely.
constexpr double kMaxEfficiency = 2;
struct EfficiencyCurve {
  std::string work;    // experts, dense: x is rows of activations; absorbed, restored: attention,
                       // x is tokens in the cache
  std::string format;  // fp8, bf16, int8, int4 or int4-bf16; empty for attention
  std::vector<std::pair<double, double>> points;  // at least one
};

// Hosts that are alike.
struct HostKind {
  std::string label;  // what to call them where a machine has several kinds
  std::string cpu;
  std::string isa;  // reference, avx2, avx512 or amx
  int sockets = 1;
  std::vector<NumaNode> nodes;                  // per host, at least one
  double one_thread_read_bytes_per_second = 0;  // from its own node
  double cross_read_bytes_per_second = 0;       // one node's cores, another's memory; 1 node: 0
  PeakRates peak;                               // all cores of one host together
  std::vector<EfficiencyCurve> curves;          // other work takes the planner's defaults
  double disk_read_bytes_per_second = 0;        // 0: unknown
  std::vector<Gpu> gpus;                        // per host, all identical
  int n_unmeasured_gpus = 0;                    // present, but with unknown rates; not in `gpus`
  Link gpu_link;                                // from a GPU to the other GPUs of its host
  int hosts = 1;                                // of this kind
  Link network;                                 // per host, to others of this kind

  int cores() const;
  int64_t memory_bytes() const;
  double read_bytes_per_second() const;  // all nodes together, each reading its own memory
  int n_gpus() const { return static_cast<int>(gpus.size()) * hosts; }
};

// The first kind of hosts, and often the only one, and the other kinds. Hosts are numbered from 0,
// kind by kind.
struct Machine : HostKind {
  std::string name;
  std::vector<HostKind> other_kinds;
  Link between_kinds;  // per host, to hosts of other kinds
  // What a request of one row to a worker and its answer take over loopback, which is what they
  // take beside a network: system calls and the waking of threads. 0: unknown.
  double request_seconds = 0;
  int64_t measured_at = 0;  // seconds since 1970; 0: not measured but described

  int n_kinds() const { return 1 + static_cast<int>(other_kinds.size()); }
  const HostKind& of_kind(int index) const { return index == 0 ? *this : other_kinds[index - 1]; }
  HostKind& of_kind(int index) { return index == 0 ? *this : other_kinds[index - 1]; }
  int kind_of(int host) const;        // its index
  int first_host_of(int kind) const;  // its number
  const HostKind& host(int index) const { return of_kind(kind_of(index)); }
  int n_hosts() const;
  int n_all_gpus() const;
  Link link(int host, int other) const;  // of each of two hosts, to the other
};

}  // namespace tandem
