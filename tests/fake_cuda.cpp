// The functions of a CUDA driver that reports two GPUs, for machines without one.
#include <cstddef>
#include <cstdio>

extern "C" {
int cuInit(unsigned) { return 0; }
int cuDeviceGetCount(int* count) {
  *count = 2;
  return 0;
}
int cuDeviceGet(int* device, int ordinal) {
  *device = 10 + ordinal;
  return 0;
}
int cuDeviceGetName(char* name, int bytes, int device) {
  std::snprintf(name, bytes, "Fake GPU %d", device - 10);
  return 0;
}
int cuDeviceTotalMem_v2(size_t* bytes, int device) {
  *bytes = size_t{device == 11 ? 80u : 24u} << 30;
  return 0;
}
}
