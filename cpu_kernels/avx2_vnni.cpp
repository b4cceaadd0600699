// Byte products with AVX-VNNI: one instruction per four products in a lane.
#include "cpu_kernels/avx2_int8.h"

namespace tandem::cpu {

void avx2_gemm(const GemmArgs&);

namespace {

struct VnniDot {
  static Integers add(Integers sum, __m256i x, __m256i w) {
    return (Integers)_mm256_dpbusd_avx_epi32((__m256i)sum, x, w);
  }
};

void gemm(const GemmArgs& a) {
  a.x.type == ActivationType::kU8 ? gemm_int8<VnniDot>(a) : avx2_gemm(a);
}

}  // namespace

void install_avx2_vnni(KernelTable& t) { t.gemm = gemm; }

}  // namespace tandem::cpu
