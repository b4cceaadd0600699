// The functions of a CUDA driver that reports two GPUs, for machines without one. The environment
// variable TANDEM_FAKE_CUDA_FAILS names a call that fails, of the second GPU where it is of one.
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace {

bool fails(std::string_view call) {
  const char* failing = std::getenv("TANDEM_FAKE_CUDA_FAILS");
  return failing && call == failing;
}

}  // namespace

extern "C" {
int cuInit(unsigned) { return fails("init") ? 100 : 0; }
int cuDeviceGetCount(int* count) {
  *count = fails("none") ? 0 : 2;
  return fails("count") ? 101 : 0;
}
int cuDeviceGet(int* device, int ordinal) {
  *device = 10 + ordinal;
  return ordinal == 1 && fails("get") ? 102 : 0;
}
int cuDeviceGetName(char* name, int bytes, int device) {
  std::snprintf(name, bytes, "Fake GPU %d", device - 10);
  return device == 11 && fails("name") ? 103 : 0;
}
int cuDeviceTotalMem_v2(size_t* bytes, int device) {
  *bytes = size_t{device == 11 ? 80u : 24u} << 30;
  return device == 11 && fails("memory") ? 104 : 0;
}
}
