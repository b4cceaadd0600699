#include "core/machine.h"

namespace tandem {

int HostKind::cores() const {
  int sum = 0;
  for (const NumaNode& node : nodes) sum += node.cores;
  return sum;
}

int64_t HostKind::memory_bytes() const {
  int64_t sum = 0;
  for (const NumaNode& node : nodes) sum += node.memory_bytes;
  return sum;
}

double HostKind::read_bytes_per_second() const {
  double sum = 0;
  for (const NumaNode& node : nodes) sum += node.read_bytes_per_second;
  return sum;
}

int Machine::kind_of(int host) const {
  int kind = 0;
  for (int end = hosts; host >= end && kind + 1 < n_kinds(); end += of_kind(kind).hosts) ++kind;
  return kind;
}

int Machine::first_host_of(int kind) const {
  int first = 0;
  for (int before = 0; before < kind; ++before) first += of_kind(before).hosts;
  return first;
}

int Machine::n_hosts() const { return first_host_of(n_kinds()); }

int Machine::n_all_gpus() const {
  int sum = n_gpus();
  for (const HostKind& kind : other_kinds) sum += kind.n_gpus();
  return sum;
}

Link Machine::link(int host, int other) const {
  return kind_of(host) == kind_of(other) ? this->host(host).network : between_kinds;
}

}  // namespace tandem
