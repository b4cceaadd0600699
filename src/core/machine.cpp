#include "core/machine.h"

namespace tandem {

int Machine::cores() const {
  int sum = 0;
  for (const NumaNode& node : nodes) sum += node.cores;
  return sum;
}

int64_t Machine::memory_bytes() const {
  int64_t sum = 0;
  for (const NumaNode& node : nodes) sum += node.memory_bytes;
  return sum;
}

double Machine::read_bytes_per_second() const {
  double sum = 0;
  for (const NumaNode& node : nodes) sum += node.read_bytes_per_second;
  return sum;
}

}  // namespace tandem
