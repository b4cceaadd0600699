// The AVX-512 intrinsics (F, BW, DQ, VL, VNNI, VBMI, BF16, BITALG) that kernels use, lane by lane
// in plain C++, after the operation sections of Intel's Software Developer's Manual, volume 2. The
// functions are in the kernels' own namespace, where they hide the compiler's functions of the same
// names. An intrinsic that is missing here does not compile ("target specific option mismatch").
// Vector types are the compiler's own. 256-bit AVX2 and FMA intrinsics stay native.
#pragma once
#pragma GCC system_header
#include "lanes.h"

namespace tandem::cpu {

// Each macro below defines an intrinsic and, for most, its mask_ and maskz_ forms. P is the prefix
// (_mm512, _mm256, _mm), V the register, T the lane type; a, b, c are one lane of each operand.
#define EMULATE_MASKED(P, name, V, T, params, args)                               \
  inline V P##_mask_##name(V old, emulate::Mask<T, V> k, EMULATE_UNPACK params) { \
    return emulate::select<T>(k, P##_##name args, old);                           \
  }                                                                               \
  inline V P##_maskz_##name(emulate::Mask<T, V> k, EMULATE_UNPACK params) {       \
    return emulate::select<T>(k, P##_##name args, V{});                           \
  }
#define EMULATE_UNPACK(...) __VA_ARGS__
#define EMULATE_UNARY(P, name, V, T, result) \
  inline V P##_##name(V va) {                \
    using namespace emulate;                 \
    auto la = lanes<T>(va);                  \
    return make<T, V>([&](int i) -> T {      \
      const T a = la[i];                     \
      return static_cast<T>(result);         \
    });                                      \
  }                                          \
  EMULATE_MASKED(P, name, V, T, (V va), (va))
#define EMULATE_BINARY(P, name, V, T, result)  \
  inline V P##_##name(V va, V vb) {            \
    using namespace emulate;                   \
    auto la = lanes<T>(va), lb = lanes<T>(vb); \
    return make<T, V>([&](int i) -> T {        \
      const T a = la[i], b = lb[i];            \
      return static_cast<T>(result);           \
    });                                        \
  }                                            \
  EMULATE_MASKED(P, name, V, T, (V va, V vb), (va, vb))
#define EMULATE_FMA(name, V, T, fma, result)                                                 \
  inline V _mm512_##name(V va, V vb, V vc) {                                                 \
    auto la = emulate::lanes<T>(va), lb = emulate::lanes<T>(vb), lc = emulate::lanes<T>(vc); \
    return emulate::make<T, V>([&](int i) {                                                  \
      const T a = la[i], b = lb[i], c = lc[i];                                               \
      return fma result;                                                                     \
    });                                                                                      \
  }                                                                                          \
  inline V _mm512_mask_##name(V a, emulate::Mask<T, V> k, V b, V c) {                        \
    return emulate::select<T>(k, _mm512_##name(a, b, c), a);                                 \
  }                                                                                          \
  inline V _mm512_mask3_##name(V a, V b, V c, emulate::Mask<T, V> k) {                       \
    return emulate::select<T>(k, _mm512_##name(a, b, c), c);                                 \
  }                                                                                          \
  inline V _mm512_maskz_##name(emulate::Mask<T, V> k, V a, V b, V c) {                       \
    return emulate::select<T>(k, _mm512_##name(a, b, c), V{});                               \
  }
#define EMULATE_MEMORY(P, suffix, V, T)                                                  \
  inline V P##_loadu_##suffix(const void* p) { return emulate::load<T>(p, ~0ull, V{}); } \
  inline V P##_mask_loadu_##suffix(V old, emulate::Mask<T, V> k, const void* p) {        \
    return emulate::load<T>(p, k, old);                                                  \
  }                                                                                      \
  inline V P##_maskz_loadu_##suffix(emulate::Mask<T, V> k, const void* p) {              \
    return emulate::load<T>(p, k, V{});                                                  \
  }                                                                                      \
  inline void P##_storeu_##suffix(void* p, V v) { emulate::store<T>(p, ~0ull, v); }      \
  inline void P##_mask_storeu_##suffix(void* p, emulate::Mask<T, V> k, V v) {            \
    emulate::store<T>(p, k, v);                                                          \
  }
#define EMULATE_ALIGNED(load_name, store_name, V)                         \
  inline V _mm512_##load_name(const void* p) {                            \
    return emulate::check_aligned(p), emulate::load<char>(p, ~0ull, V{}); \
  }                                                                       \
  inline void _mm512_##store_name(void* p, V v) {                         \
    emulate::check_aligned(p), emulate::store<char>(p, ~0ull, v);         \
  }
#define EMULATE_MOVES(P, suffix, V, T)                                   \
  inline V P##_mask_blend_##suffix(emulate::Mask<T, V> k, V no, V yes) { \
    return emulate::select<T>(k, yes, no);                               \
  }                                                                      \
  inline V P##_mask_mov_##suffix(V old, emulate::Mask<T, V> k, V v) {    \
    return emulate::select<T>(k, v, old);                                \
  }                                                                      \
  inline V P##_maskz_mov_##suffix(emulate::Mask<T, V> k, V v) {          \
    return emulate::select<T>(k, v, V{});                                \
  }
#define EMULATE_SET(suffix, V, T)                                                \
  inline V _mm512_set1_##suffix(T x) {                                           \
    return emulate::make<T, V>([&](int) { return x; });                          \
  }                                                                              \
  template <class... X>                                                          \
  V _mm512_set_##suffix(X... x) { /* the highest lane comes first */             \
    static_assert(sizeof...(x) * sizeof(T) == 64);                               \
    const T in[] = {static_cast<T>(x)...};                                       \
    return emulate::make<T, V>([&](int i) { return in[sizeof...(x) - 1 - i]; }); \
  }
// A shift by the lane's width or more leaves 0, or the sign.
#define EMULATE_SHIFTS(suffix, T)                                                                \
  inline __m512i _mm512_slli_##suffix(__m512i v, unsigned s) {                                   \
    auto x = emulate::lanes<emulate::u##T>(v);                                                   \
    return emulate::make<emulate::u##T, __m512i>([&](int i) { return s < T ? x[i] << s : 0; });  \
  }                                                                                              \
  inline __m512i _mm512_srli_##suffix(__m512i v, unsigned s) {                                   \
    auto x = emulate::lanes<emulate::u##T>(v);                                                   \
    return emulate::make<emulate::u##T, __m512i>([&](int i) { return s < T ? x[i] >> s : 0; });  \
  }                                                                                              \
  inline __m512i _mm512_srai_##suffix(__m512i v, unsigned s) {                                   \
    auto x = emulate::lanes<emulate::i##T>(v);                                                   \
    return emulate::make<emulate::i##T, __m512i>(                                                \
        [&](int i) { return x[i] >> (s < T ? s : T - 1); });                                     \
  }                                                                                              \
  EMULATE_MASKED(_mm512, slli_##suffix, __m512i, emulate::u##T, (__m512i v, unsigned s), (v, s)) \
  EMULATE_MASKED(_mm512, srli_##suffix, __m512i, emulate::u##T, (__m512i v, unsigned s), (v, s)) \
  EMULATE_MASKED(_mm512, srai_##suffix, __m512i, emulate::u##T, (__m512i v, unsigned s), (v, s)) \
  EMULATE_BINARY(_mm512, sllv_##suffix, __m512i, emulate::u##T, b < T ? a << b : 0)              \
  EMULATE_BINARY(_mm512, srlv_##suffix, __m512i, emulate::u##T, b < T ? a >> b : 0)              \
  EMULATE_BINARY(_mm512, srav_##suffix, __m512i, emulate::i##T,                                  \
                 a >> (static_cast<emulate::u##T>(b) < T ? b : T - 1))
#define EMULATE_COMPARE(name, T, relation)                                                \
  inline emulate::Mask<T, __m512i> _mm512_##name##_mask(__m512i va, __m512i vb) {         \
    auto lb = emulate::lanes<T>(vb);                                                      \
    return emulate::mask_of<T>(va, [&](T a, int i) { return a relation lb[i]; });         \
  }                                                                                       \
  inline emulate::Mask<T, __m512i> _mm512_mask_##name##_mask(emulate::Mask<T, __m512i> k, \
                                                             __m512i a, __m512i b) {      \
    return k & _mm512_##name##_mask(a, b);                                                \
  }
#define EMULATE_COMPARES(suffix, T)                                                            \
  EMULATE_COMPARE(cmpeq_##suffix, T, ==)                                                       \
  EMULATE_COMPARE(cmpneq_##suffix, T, !=)                                                      \
  EMULATE_COMPARE(cmplt_##suffix, T, <)                                                        \
  EMULATE_COMPARE(cmple_##suffix, T, <=)                                                       \
  EMULATE_COMPARE(cmpgt_##suffix, T, >)                                                        \
  EMULATE_COMPARE(cmpge_##suffix, T, >=)                                                       \
  inline emulate::Mask<T, __m512i> _mm512_cmp_##suffix##_mask(__m512i va, __m512i vb, int p) { \
    auto lb = emulate::lanes<T>(vb);                                                           \
    return emulate::mask_of<T>(                                                                \
        va, [&](T a, int i) { return emulate::compare_integers<T>(a, lb[i], p); });            \
  }
#define EMULATE_TESTS(width)                                                                      \
  inline emulate::Mask<emulate::i##width, __m512i> _mm512_test_epi##width##_mask(__m512i a,       \
                                                                                 __m512i b) {     \
    return emulate::mask_of<emulate::i##width>((__m512i)(a & b),                                  \
                                               [](auto x, int) { return x != 0; });               \
  }                                                                                               \
  inline emulate::Mask<emulate::i##width, __m512i> _mm512_testn_epi##width##_mask(__m512i a,      \
                                                                                  __m512i b) {    \
    return emulate::mask_of<emulate::i##width>((__m512i)(a & b),                                  \
                                               [](auto x, int) { return x == 0; });               \
  }                                                                                               \
  inline emulate::Mask<emulate::i##width, __m512i> _mm512_movepi##width##_mask(__m512i a) {       \
    return emulate::mask_of<emulate::i##width>(a, [](auto x, int) { return x < 0; });             \
  }                                                                                               \
  inline __m512i _mm512_movm_epi##width(emulate::Mask<emulate::i##width, __m512i> k) {            \
    return emulate::make<emulate::i##width, __m512i>([&](int i) { return k >> i & 1 ? -1 : 0; }); \
  }
#define EMULATE_PERMUTE(suffix, V, T, I)                                                        \
  inline V _mm512_permutexvar_##suffix(__m512i index, V a) {                                    \
    return emulate::permute<T, I>(index, a);                                                    \
  }                                                                                             \
  inline V _mm512_permutex2var_##suffix(V a, __m512i index, V b) {                              \
    return emulate::permute2<T, I>(a, index, b);                                                \
  }                                                                                             \
  EMULATE_MASKED(_mm512, permutexvar_##suffix, V, T, (__m512i index, V a), (index, a))          \
  inline V _mm512_mask_permutex2var_##suffix(V a, emulate::Mask<T, V> k, __m512i index, V b) {  \
    return emulate::select<T>(k, _mm512_permutex2var_##suffix(a, index, b), a);                 \
  }                                                                                             \
  inline V _mm512_maskz_permutex2var_##suffix(emulate::Mask<T, V> k, V a, __m512i index, V b) { \
    return emulate::select<T>(k, _mm512_permutex2var_##suffix(a, index, b), V{});               \
  }
#define EMULATE_UNPACKS(suffix, V, T)                                                              \
  inline V _mm512_unpacklo_##suffix(V a, V b) {                                                    \
    return emulate::in_quarters<T>(a, b,                                                           \
                                   [](T* x, T* y, int i) { return i % 2 ? y[i / 2] : x[i / 2]; }); \
  }                                                                                                \
  inline V _mm512_unpackhi_##suffix(V a, V b) {                                                    \
    constexpr int half = 8 / sizeof(T);                                                            \
    return emulate::in_quarters<T>(                                                                \
        a, b, [](T* x, T* y, int i) { return i % 2 ? y[half + i / 2] : x[half + i / 2]; });        \
  }
#define EMULATE_CONVERT(P, name, VTo, To, VFrom, From, result)             \
  inline VTo P##_##name(VFrom v) {                                         \
    using namespace emulate;                                               \
    return convert<To, VTo, From>(v, [](From a) -> To { return result; }); \
  }                                                                        \
  EMULATE_MASKED(P, name, VTo, To, (VFrom v), (v))
// Narrowing with a masked store of the narrow lanes.
#define EMULATE_NARROW(P, name, VTo, To, V, From, store_name, result)         \
  inline VTo P##_##name(V v) {                                                \
    using namespace emulate;                                                  \
    return convert<To, VTo, From>(v, [](From a) -> To { return result; });    \
  }                                                                           \
  inline VTo P##_maskz_##name(emulate::Mask<From, V> k, V v) {                \
    return emulate::select<To>(k, P##_##name(v), VTo{});                      \
  }                                                                           \
  inline void P##_mask_##store_name(void* p, emulate::Mask<From, V> k, V v) { \
    emulate::store<To>(p, k, P##_##name(v));                                  \
  }
#define EMULATE_REDUCE(name, V, T, result)                              \
  inline T _mm512_reduce_##name(V v) {                                  \
    return emulate::reduce<T>(v, [](T a, T b) -> T { return result; }); \
  }
#define EMULATE_DOT(name, A, B, saturates)                  \
  EMULATE_DOT_WIDTH(_mm512, name, __m512i, A, B, saturates) \
  EMULATE_DOT_WIDTH(_mm256, name, __m256i, A, B, saturates) \
  EMULATE_DOT_WIDTH(_mm, name, __m128i, A, B, saturates)
#define EMULATE_DOT_WIDTH(P, name, V, A, B, saturates)                           \
  inline V P##_##name(V sum, V a, V b) {                                         \
    return emulate::dot<emulate::A, emulate::B, saturates>(sum, a, b);           \
  }                                                                              \
  inline V P##_mask_##name(V sum, emulate::Mask<emulate::i32, V> k, V a, V b) {  \
    return emulate::select<emulate::i32>(k, P##_##name(sum, a, b), sum);         \
  }                                                                              \
  inline V P##_maskz_##name(emulate::Mask<emulate::i32, V> k, V sum, V a, V b) { \
    return emulate::select<emulate::i32>(k, P##_##name(sum, a, b), V{});         \
  }

// Constants, casts, memory.

EMULATE_SET(ps, __m512, float)
EMULATE_SET(pd, __m512d, double)
EMULATE_SET(epi8, __m512i, char)
EMULATE_SET(epi16, __m512i, short)
EMULATE_SET(epi32, __m512i, int)
EMULATE_SET(epi64, __m512i, long long)

inline __m512 _mm512_setzero_ps() { return __m512{}; }
inline __m512d _mm512_setzero_pd() { return __m512d{}; }
inline __m512i _mm512_setzero_si512() { return __m512i{}; }
inline __m512i _mm512_setzero_epi32() { return __m512i{}; }
inline __m512 _mm512_undefined_ps() { return _mm512_set1_ps(__builtin_nanf("")); }

inline __m512i _mm512_castps_si512(__m512 v) { return (__m512i)v; }
inline __m512 _mm512_castsi512_ps(__m512i v) { return (__m512)v; }
inline __m512d _mm512_castps_pd(__m512 v) { return (__m512d)v; }
inline __m512 _mm512_castpd_ps(__m512d v) { return (__m512)v; }
inline __m512d _mm512_castsi512_pd(__m512i v) { return (__m512d)v; }
inline __m512i _mm512_castpd_si512(__m512d v) { return (__m512i)v; }
inline __m256i _mm512_castsi512_si256(__m512i v) { return emulate::extract<__m256i>(v, 0); }
inline __m128i _mm512_castsi512_si128(__m512i v) { return emulate::extract<__m128i>(v, 0); }
inline __m256 _mm512_castps512_ps256(__m512 v) { return emulate::extract<__m256>(v, 0); }
inline __m128 _mm512_castps512_ps128(__m512 v) { return emulate::extract<__m128>(v, 0); }
inline float _mm512_cvtss_f32(__m512 v) { return v[0]; }
inline int _mm512_cvtsi512_si32(__m512i v) { return static_cast<int>(v[0]); }
// The upper lanes of a widening cast are undefined. They are all ones here, a NaN, so that using
// them shows in the result.
inline __m512i _mm512_castsi256_si512(__m256i v) {
  return emulate::insert(_mm512_set1_epi8(-1), v, 0);
}
inline __m512i _mm512_castsi128_si512(__m128i v) {
  return emulate::insert(_mm512_set1_epi8(-1), v, 0);
}
inline __m512 _mm512_castps256_ps512(__m256 v) {
  return emulate::insert((__m512)_mm512_set1_epi8(-1), v, 0);
}
inline __m512 _mm512_castps128_ps512(__m128 v) {
  return emulate::insert((__m512)_mm512_set1_epi8(-1), v, 0);
}
inline __m512i _mm512_zextsi256_si512(__m256i v) { return emulate::insert(__m512i{}, v, 0); }
inline __m512i _mm512_zextsi128_si512(__m128i v) { return emulate::insert(__m512i{}, v, 0); }
inline __m512 _mm512_zextps256_ps512(__m256 v) { return emulate::insert(__m512{}, v, 0); }

EMULATE_MEMORY(_mm512, epi8, __m512i, char)
EMULATE_MEMORY(_mm512, epi16, __m512i, short)
EMULATE_MEMORY(_mm512, epi32, __m512i, int)
EMULATE_MEMORY(_mm512, epi64, __m512i, long long)
EMULATE_MEMORY(_mm512, ps, __m512, float)
EMULATE_MEMORY(_mm512, pd, __m512d, double)
EMULATE_MEMORY(_mm256, epi8, __m256i, char)
EMULATE_MEMORY(_mm256, epi16, __m256i, short)
EMULATE_MEMORY(_mm256, epi32, __m256i, int)
EMULATE_MEMORY(_mm256, ps, __m256, float)
EMULATE_MEMORY(_mm, epi8, __m128i, char)
EMULATE_MEMORY(_mm, epi16, __m128i, short)
EMULATE_MEMORY(_mm, epi32, __m128i, int)
EMULATE_MEMORY(_mm, ps, __m128, float)
inline __m512i _mm512_loadu_si512(const void* p) { return _mm512_loadu_epi8(p); }
inline void _mm512_storeu_si512(void* p, __m512i v) { _mm512_storeu_epi8(p, v); }
EMULATE_ALIGNED(load_si512, store_si512, __m512i)
EMULATE_ALIGNED(load_epi32, store_epi32, __m512i)
EMULATE_ALIGNED(load_ps, store_ps, __m512)
EMULATE_ALIGNED(load_pd, store_pd, __m512d)
EMULATE_ALIGNED(stream_load_si512, stream_si512, __m512i)
inline void _mm512_stream_ps(void* p, __m512 v) { _mm512_store_ps(p, v); }

EMULATE_MOVES(_mm512, epi8, __m512i, char)
EMULATE_MOVES(_mm512, epi16, __m512i, short)
EMULATE_MOVES(_mm512, epi32, __m512i, int)
EMULATE_MOVES(_mm512, epi64, __m512i, long long)
EMULATE_MOVES(_mm512, ps, __m512, float)
EMULATE_MOVES(_mm256, epi8, __m256i, char)
EMULATE_MOVES(_mm256, epi16, __m256i, short)
EMULATE_MOVES(_mm256, epi32, __m256i, int)
EMULATE_MOVES(_mm256, ps, __m256, float)

// Integers.

EMULATE_BINARY(_mm512, add_epi8, __m512i, uint8_t, a + b)
EMULATE_BINARY(_mm512, add_epi16, __m512i, uint16_t, a + b)
EMULATE_BINARY(_mm512, add_epi32, __m512i, uint32_t, a + b)
EMULATE_BINARY(_mm512, add_epi64, __m512i, uint64_t, a + b)
EMULATE_BINARY(_mm512, sub_epi8, __m512i, uint8_t, a - b)
EMULATE_BINARY(_mm512, sub_epi16, __m512i, uint16_t, a - b)
EMULATE_BINARY(_mm512, sub_epi32, __m512i, uint32_t, a - b)
EMULATE_BINARY(_mm512, sub_epi64, __m512i, uint64_t, a - b)
EMULATE_BINARY(_mm512, adds_epi8, __m512i, int8_t, saturate<i8>(a + b))
EMULATE_BINARY(_mm512, adds_epi16, __m512i, int16_t, saturate<i16>(a + b))
EMULATE_BINARY(_mm512, subs_epi8, __m512i, int8_t, saturate<i8>(a - b))
EMULATE_BINARY(_mm512, subs_epi16, __m512i, int16_t, saturate<i16>(a - b))
EMULATE_BINARY(_mm512, mullo_epi16, __m512i, uint16_t, u32{a} * b)
EMULATE_BINARY(_mm512, mulhi_epi16, __m512i, int16_t, a* b >> 16)
EMULATE_BINARY(_mm512, mulhrs_epi16, __m512i, int16_t, ((a * b >> 14) + 1) >> 1)
EMULATE_BINARY(_mm512, mullo_epi32, __m512i, uint32_t, a* b)
EMULATE_BINARY(_mm512, min_epi8, __m512i, int8_t, a < b ? a : b)
EMULATE_BINARY(_mm512, max_epi8, __m512i, int8_t, a > b ? a : b)
EMULATE_BINARY(_mm512, min_epu8, __m512i, uint8_t, a < b ? a : b)
EMULATE_BINARY(_mm512, max_epu8, __m512i, uint8_t, a > b ? a : b)
EMULATE_BINARY(_mm512, min_epi16, __m512i, int16_t, a < b ? a : b)
EMULATE_BINARY(_mm512, max_epi16, __m512i, int16_t, a > b ? a : b)
EMULATE_BINARY(_mm512, min_epi32, __m512i, int32_t, a < b ? a : b)
EMULATE_BINARY(_mm512, max_epi32, __m512i, int32_t, a > b ? a : b)
EMULATE_UNARY(_mm512, abs_epi8, __m512i, int8_t, a < 0 ? -a : a)
EMULATE_UNARY(_mm512, abs_epi16, __m512i, int16_t, a < 0 ? -a : a)
EMULATE_UNARY(_mm512, abs_epi32, __m512i, int32_t, a < 0 ? 0u - static_cast<u32>(a) : a)
EMULATE_UNARY(_mm512, popcnt_epi8, __m512i, uint8_t, __builtin_popcount(a))
EMULATE_UNARY(_mm512, popcnt_epi32, __m512i, uint32_t, __builtin_popcount(a))

EMULATE_BINARY(_mm512, and_epi32, __m512i, uint32_t, a& b)
EMULATE_BINARY(_mm512, or_epi32, __m512i, uint32_t, a | b)
EMULATE_BINARY(_mm512, xor_epi32, __m512i, uint32_t, a ^ b)
EMULATE_BINARY(_mm512, andnot_epi32, __m512i, uint32_t, ~a& b)
EMULATE_BINARY(_mm512, and_epi64, __m512i, uint64_t, a& b)
EMULATE_BINARY(_mm512, or_epi64, __m512i, uint64_t, a | b)
EMULATE_BINARY(_mm512, xor_epi64, __m512i, uint64_t, a ^ b)
EMULATE_BINARY(_mm512, andnot_epi64, __m512i, uint64_t, ~a& b)
inline __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
inline __m512i _mm512_or_si512(__m512i a, __m512i b) { return a | b; }
inline __m512i _mm512_xor_si512(__m512i a, __m512i b) { return a ^ b; }
inline __m512i _mm512_andnot_si512(__m512i a, __m512i b) { return ~a & b; }
inline __m512i _mm512_ternarylogic_epi64(__m512i a, __m512i b, __m512i c, int table) {
  __m512i out{};
  for (int i = 0; i < 8; ++i)
    if (table >> i & 1) out |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return out;
}
inline __m512i _mm512_ternarylogic_epi32(__m512i a, __m512i b, __m512i c, int table) {
  return _mm512_ternarylogic_epi64(a, b, c, table);
}

EMULATE_SHIFTS(epi16, 16)
EMULATE_SHIFTS(epi32, 32)
EMULATE_SHIFTS(epi64, 64)
inline __m512i _mm512_rol_epi32(__m512i v, int s) {
  return _mm512_or_si512(_mm512_slli_epi32(v, s & 31), _mm512_srli_epi32(v, 32 - (s & 31)));
}
inline __m512i _mm512_ror_epi32(__m512i v, int s) { return _mm512_rol_epi32(v, -s); }

EMULATE_COMPARES(epi8, emulate::i8)
EMULATE_COMPARES(epu8, emulate::u8)
EMULATE_COMPARES(epi16, emulate::i16)
EMULATE_COMPARES(epu16, emulate::u16)
EMULATE_COMPARES(epi32, emulate::i32)
EMULATE_COMPARES(epu32, emulate::u32)
EMULATE_COMPARES(epi64, emulate::i64)
EMULATE_TESTS(8)
EMULATE_TESTS(16)
EMULATE_TESTS(32)

EMULATE_DOT(dpbusd_epi32, u8, i8, false)
EMULATE_DOT(dpbusds_epi32, u8, i8, true)
inline __m256i _mm256_dpbusd_avx_epi32(__m256i sum, __m256i a, __m256i b) {  // AVX-VNNI's name
  return _mm256_dpbusd_epi32(sum, a, b);
}
EMULATE_DOT(dpwssd_epi32, i16, i16, false)
EMULATE_DOT(dpwssds_epi32, i16, i16, true)
inline __m512i _mm512_madd_epi16(__m512i a, __m512i b) {
  return _mm512_dpwssd_epi32(__m512i{}, a, b);
}
inline __m512i _mm512_maddubs_epi16(__m512i va, __m512i vb) {
  auto a = emulate::lanes<uint8_t>(va);
  auto b = emulate::lanes<int8_t>(vb);
  return emulate::make<int16_t, __m512i>([&](int i) {
    return emulate::saturate<int16_t>(a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1]);
  });
}
inline __m512i _mm512_sad_epu8(__m512i va, __m512i vb) {
  auto a = emulate::lanes<uint8_t>(va), b = emulate::lanes<uint8_t>(vb);
  return emulate::make<uint64_t, __m512i>([&](int i) {
    uint64_t sum = 0;
    for (int j = 8 * i; j < 8 * i + 8; ++j) sum += a[j] < b[j] ? b[j] - a[j] : a[j] - b[j];
    return sum;
  });
}

// Shuffles.

EMULATE_PERMUTE(epi8, __m512i, char, uint8_t)
EMULATE_PERMUTE(epi16, __m512i, short, uint16_t)
EMULATE_PERMUTE(epi32, __m512i, int, uint32_t)
EMULATE_PERMUTE(epi64, __m512i, long long, uint64_t)
EMULATE_PERMUTE(ps, __m512, float, uint32_t)
inline __m512i _mm512_shuffle_epi8(__m512i a, __m512i index) {
  return emulate::in_quarters<uint8_t>(
      a, index, [](uint8_t* x, uint8_t* at, int i) { return at[i] & 128 ? 0 : x[at[i] & 15]; });
}
EMULATE_MASKED(_mm512, shuffle_epi8, __m512i, char, (__m512i a, __m512i index), (a, index))
// A macro, because the enum, a type of the global namespace, would select the compiler's function.
#define _mm512_shuffle_epi32(a, order) emulate::shuffle_epi32(a, order)
inline __m512 _mm512_shuffle_ps(__m512 a, __m512 b, int order) {
  return emulate::in_quarters<float>(
      a, b, [&](float* x, float* y, int i) { return (i < 2 ? x : y)[order >> 2 * i & 3]; });
}
inline __m512 _mm512_permute_ps(__m512 a, int order) { return _mm512_shuffle_ps(a, a, order); }
inline __m512i _mm512_shuffle_i64x2(__m512i a, __m512i b, int o) {
  return emulate::quarters(a, b, o & 3, o >> 2 & 3, 4 + (o >> 4 & 3), 4 + (o >> 6 & 3));
}
inline __m512i _mm512_shuffle_i32x4(__m512i a, __m512i b, int o) {
  return _mm512_shuffle_i64x2(a, b, o);
}
inline __m512 _mm512_shuffle_f32x4(__m512 a, __m512 b, int o) {
  return (__m512)_mm512_shuffle_i64x2((__m512i)a, (__m512i)b, o);
}
EMULATE_UNPACKS(epi8, __m512i, char)
EMULATE_UNPACKS(epi16, __m512i, short)
EMULATE_UNPACKS(epi32, __m512i, int)
EMULATE_UNPACKS(epi64, __m512i, long long)
EMULATE_UNPACKS(ps, __m512, float)
inline __m512i _mm512_packs_epi32(__m512i a, __m512i b) {
  return emulate::pack<int16_t, int32_t>(a, b);
}
inline __m512i _mm512_packus_epi32(__m512i a, __m512i b) {
  return emulate::pack<uint16_t, int32_t>(a, b);
}
inline __m512i _mm512_packs_epi16(__m512i a, __m512i b) {
  return emulate::pack<int8_t, int16_t>(a, b);
}
inline __m512i _mm512_packus_epi16(__m512i a, __m512i b) {
  return emulate::pack<uint8_t, int16_t>(a, b);
}
inline __m512i _mm512_alignr_epi8(__m512i high, __m512i low, int s) {
  return emulate::in_quarters<char>(high, low, [&](char* h, char* l, int i) -> char {
    const int j = i + s;
    return j < 16 ? l[j] : j < 32 ? h[j - 16] : 0;
  });
}
inline __m512i _mm512_bsrli_epi128(__m512i a, int s) { return _mm512_alignr_epi8(__m512i{}, a, s); }
inline __m512i _mm512_bslli_epi128(__m512i a, int s) {
  return emulate::in_quarters<char>(
      a, a, [&](char* x, char*, int i) -> char { return i < s ? 0 : x[i - s]; });
}
inline __m512i _mm512_alignr_epi32(__m512i high, __m512i low, int s) {
  auto h = emulate::lanes<int>(high), l = emulate::lanes<int>(low);
  return emulate::make<int, __m512i>([&](int i) {
    const int j = i + (s & 15);
    return j < 16 ? l[j] : h[j - 16];
  });
}
inline __m512i _mm512_multishift_epi64_epi8(__m512i control, __m512i v) {
  auto c = emulate::lanes<uint8_t>(control);
  auto x = emulate::lanes<uint64_t>(v);
  return emulate::make<uint8_t, __m512i>([&](int i) {
    const int s = c[i] & 63;
    return static_cast<uint8_t>(s == 0 ? x[i / 8] : x[i / 8] >> s | x[i / 8] << (64 - s));
  });
}

inline __m512i _mm512_broadcastb_epi8(__m128i v) {
  return _mm512_set1_epi8(emulate::extract<char>(v, 0));
}
inline __m512i _mm512_broadcastw_epi16(__m128i v) {
  return _mm512_set1_epi16(emulate::extract<short>(v, 0));
}
inline __m512i _mm512_broadcastd_epi32(__m128i v) {
  return _mm512_set1_epi32(emulate::extract<int>(v, 0));
}
inline __m512i _mm512_broadcastq_epi64(__m128i v) { return _mm512_set1_epi64(v[0]); }
inline __m512 _mm512_broadcastss_ps(__m128 v) { return _mm512_set1_ps(v[0]); }
inline __m512i _mm512_broadcast_i32x4(__m128i v) {
  return emulate::make<__m128i, __m512i>([&](int) { return v; });
}
inline __m512i _mm512_broadcast_i64x4(__m256i v) {
  return emulate::make<__m256i, __m512i>([&](int) { return v; });
}
inline __m512i _mm512_broadcast_i32x8(__m256i v) { return _mm512_broadcast_i64x4(v); }
inline __m512 _mm512_broadcast_f32x4(__m128 v) {
  return (__m512)_mm512_broadcast_i32x4((__m128i)v);
}
inline __m512 _mm512_broadcast_f32x8(__m256 v) {
  return (__m512)_mm512_broadcast_i64x4((__m256i)v);
}

inline __m128i _mm512_extracti32x4_epi32(__m512i v, int i) {
  return emulate::extract<__m128i>(v, i & 3);
}
inline __m128i _mm512_extracti64x2_epi64(__m512i v, int i) {
  return emulate::extract<__m128i>(v, i & 3);
}
inline __m256i _mm512_extracti32x8_epi32(__m512i v, int i) {
  return emulate::extract<__m256i>(v, i & 1);
}
inline __m256i _mm512_extracti64x4_epi64(__m512i v, int i) {
  return emulate::extract<__m256i>(v, i & 1);
}
inline __m128 _mm512_extractf32x4_ps(__m512 v, int i) { return emulate::extract<__m128>(v, i & 3); }
inline __m256 _mm512_extractf32x8_ps(__m512 v, int i) { return emulate::extract<__m256>(v, i & 1); }
inline __m256d _mm512_extractf64x4_pd(__m512d v, int i) {
  return emulate::extract<__m256d>(v, i & 1);
}
inline __m512i _mm512_inserti32x4(__m512i v, __m128i x, int i) {
  return emulate::insert(v, x, i & 3);
}
inline __m512i _mm512_inserti32x8(__m512i v, __m256i x, int i) {
  return emulate::insert(v, x, i & 1);
}
inline __m512i _mm512_inserti64x4(__m512i v, __m256i x, int i) {
  return emulate::insert(v, x, i & 1);
}
inline __m512 _mm512_insertf32x4(__m512 v, __m128 x, int i) { return emulate::insert(v, x, i & 3); }
inline __m512 _mm512_insertf32x8(__m512 v, __m256 x, int i) { return emulate::insert(v, x, i & 1); }

// Floating point.

EMULATE_BINARY(_mm512, add_ps, __m512, float, a + b)
EMULATE_BINARY(_mm512, sub_ps, __m512, float, a - b)
EMULATE_BINARY(_mm512, mul_ps, __m512, float, a* b)
EMULATE_BINARY(_mm512, div_ps, __m512, float, a / b)
EMULATE_BINARY(_mm512, max_ps, __m512, float, a > b ? a : b)
EMULATE_BINARY(_mm512, min_ps, __m512, float, a < b ? a : b)
EMULATE_BINARY(_mm512, add_pd, __m512d, double, a + b)
EMULATE_BINARY(_mm512, mul_pd, __m512d, double, a* b)
EMULATE_UNARY(_mm512, sqrt_ps, __m512, float, __builtin_sqrtf(a))
// The CPU's results of the next two are within 2^-14 of these and have other bits.
EMULATE_UNARY(_mm512, rcp14_ps, __m512, float, 1 / a)
EMULATE_UNARY(_mm512, rsqrt14_ps, __m512, float, 1 / __builtin_sqrtf(a))
EMULATE_UNARY(_mm512, getexp_ps, __m512, float, __builtin_logbf(a))
EMULATE_FMA(fmadd_ps, __m512, float, __builtin_fmaf, (a, b, c))
EMULATE_FMA(fmsub_ps, __m512, float, __builtin_fmaf, (a, b, -c))
EMULATE_FMA(fnmadd_ps, __m512, float, __builtin_fmaf, (-a, b, c))
EMULATE_FMA(fnmsub_ps, __m512, float, __builtin_fmaf, (-a, b, -c))
EMULATE_FMA(fmadd_pd, __m512d, double, __builtin_fma, (a, b, c))
inline __m512 _mm512_abs_ps(__m512 v) {
  return (__m512)((__m512i)v & _mm512_set1_epi32(0x7fffffff));
}
inline __m512 _mm512_and_ps(__m512 a, __m512 b) { return (__m512)((__m512i)a & (__m512i)b); }
inline __m512 _mm512_or_ps(__m512 a, __m512 b) { return (__m512)((__m512i)a | (__m512i)b); }
inline __m512 _mm512_xor_ps(__m512 a, __m512 b) { return (__m512)((__m512i)a ^ (__m512i)b); }
inline __m512 _mm512_andnot_ps(__m512 a, __m512 b) { return (__m512)(~(__m512i)a & (__m512i)b); }

// a * 2^floor(b), rounded once.
inline __m512 _mm512_scalef_ps(__m512 va, __m512 vb) {
  auto a = emulate::lanes<float>(va), b = emulate::lanes<float>(vb);
  return emulate::make<float, __m512>([&](int i) {
    if (a[i] != a[i] || b[i] != b[i]) return a[i] + b[i];
    if (__builtin_isinf(b[i])) return a[i] * (b[i] > 0 ? b[i] : 0);
    const float e = __builtin_floorf(b[i]);
    return __builtin_ldexpf(a[i], e > 1000 ? 1000 : e < -1000 ? -1000 : static_cast<int>(e));
  });
}
EMULATE_MASKED(_mm512, scalef_ps, __m512, float, (__m512 a, __m512 b), (a, b))
// Rounds to a multiple of 2^-(control >> 4).
inline __m512 _mm512_roundscale_ps(__m512 v, int control) {
  auto x = emulate::lanes<float>(v);
  return emulate::make<float, __m512>([&](int i) {
    const float scaled = __builtin_ldexpf(x[i], control >> 4);
    return __builtin_isinf(scaled)
               ? x[i]
               : __builtin_ldexpf(emulate::round_to(scaled, control), -(control >> 4));
  });
}

inline __mmask16 _mm512_cmp_ps_mask(__m512 va, __m512 vb, int predicate) {
  auto b = emulate::lanes<float>(vb);
  return emulate::mask_of<float>(
      va, [&](float a, int i) { return emulate::compare(a, b[i], predicate); });
}
inline __mmask16 _mm512_mask_cmp_ps_mask(__mmask16 k, __m512 a, __m512 b, int predicate) {
  return k & _mm512_cmp_ps_mask(a, b, predicate);
}

EMULATE_REDUCE(add_ps, __m512, float, a + b)
EMULATE_REDUCE(mul_ps, __m512, float, a* b)
EMULATE_REDUCE(max_ps, __m512, float, a > b ? a : b)
EMULATE_REDUCE(min_ps, __m512, float, a < b ? a : b)
EMULATE_REDUCE(add_pd, __m512d, double, a + b)
EMULATE_REDUCE(add_epi32, __m512i, int, static_cast<int>(0u + a + b))
EMULATE_REDUCE(max_epi32, __m512i, int, a > b ? a : b)
EMULATE_REDUCE(min_epi32, __m512i, int, a < b ? a : b)
EMULATE_REDUCE(add_epi64, __m512i, long long, static_cast<long long>(0ull + a + b))
inline float _mm512_mask_reduce_add_ps(__mmask16 k, __m512 v) {
  return _mm512_reduce_add_ps(_mm512_maskz_mov_ps(k, v));
}
inline float _mm512_mask_reduce_max_ps(__mmask16 k, __m512 v) {
  return _mm512_reduce_max_ps(_mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), k, v));
}

// Conversions.

EMULATE_CONVERT(_mm512, cvtepi8_epi16, __m512i, int16_t, __m256i, int8_t, a)
EMULATE_CONVERT(_mm512, cvtepu8_epi16, __m512i, int16_t, __m256i, uint8_t, a)
EMULATE_CONVERT(_mm512, cvtepi8_epi32, __m512i, int32_t, __m128i, int8_t, a)
EMULATE_CONVERT(_mm512, cvtepu8_epi32, __m512i, int32_t, __m128i, uint8_t, a)
EMULATE_CONVERT(_mm512, cvtepi16_epi32, __m512i, int32_t, __m256i, int16_t, a)
EMULATE_CONVERT(_mm512, cvtepu16_epi32, __m512i, int32_t, __m256i, uint16_t, a)
EMULATE_CONVERT(_mm512, cvtepi32_epi64, __m512i, int64_t, __m256i, int32_t, a)
EMULATE_CONVERT(_mm512, cvtepu32_epi64, __m512i, int64_t, __m256i, uint32_t, a)
EMULATE_CONVERT(_mm512, cvtepi32_ps, __m512, float, __m512i, int32_t, static_cast<float>(a))
EMULATE_CONVERT(_mm512, cvtepu32_ps, __m512, float, __m512i, uint32_t, static_cast<float>(a))
EMULATE_CONVERT(_mm512, cvtps_epi32, __m512i, int32_t, __m512, float, to_i32(__builtin_rintf(a)))
EMULATE_CONVERT(_mm512, cvttps_epi32, __m512i, int32_t, __m512, float, to_i32(__builtin_truncf(a)))
EMULATE_CONVERT(_mm512, cvtps_pd, __m512d, double, __m256, float, a)
EMULATE_CONVERT(_mm512, cvtpd_ps, __m256, float, __m512d, double, static_cast<float>(a))
inline __m512i _mm512_cvt_roundps_epi32(__m512 v, int mode) {
  return emulate::convert<int32_t, __m512i, float>(
      v, [&](float a) { return emulate::to_i32(emulate::round_to(a, mode)); });
}
EMULATE_NARROW(_mm512, cvtepi16_epi8, __m256i, int8_t, __m512i, int16_t, cvtepi16_storeu_epi8,
               static_cast<int8_t>(a))
EMULATE_NARROW(_mm512, cvtsepi16_epi8, __m256i, int8_t, __m512i, int16_t, cvtsepi16_storeu_epi8,
               saturate<int8_t>(a))
EMULATE_NARROW(_mm512, cvtepi32_epi8, __m128i, int8_t, __m512i, int32_t, cvtepi32_storeu_epi8,
               static_cast<int8_t>(a))
EMULATE_NARROW(_mm512, cvtsepi32_epi8, __m128i, int8_t, __m512i, int32_t, cvtsepi32_storeu_epi8,
               saturate<int8_t>(a))
EMULATE_NARROW(_mm512, cvtusepi32_epi8, __m128i, uint8_t, __m512i, uint32_t, cvtusepi32_storeu_epi8,
               saturate<uint8_t>(a))
EMULATE_NARROW(_mm512, cvtepi32_epi16, __m256i, int16_t, __m512i, int32_t, cvtepi32_storeu_epi16,
               static_cast<int16_t>(a))
EMULATE_NARROW(_mm512, cvtsepi32_epi16, __m256i, int16_t, __m512i, int32_t, cvtsepi32_storeu_epi16,
               saturate<int16_t>(a))
EMULATE_NARROW(_mm512, cvtepi64_epi32, __m256i, int32_t, __m512i, int64_t, cvtepi64_storeu_epi32,
               static_cast<int32_t>(a))
EMULATE_NARROW(_mm256, cvtepi16_epi8, __m128i, int8_t, __m256i, int16_t, cvtepi16_storeu_epi8,
               static_cast<int8_t>(a))

inline __m512 _mm512_cvtph_ps(__m256i v) {
  return emulate::make<__m256, __m512>(
      [&](int i) { return _mm256_cvtph_ps(emulate::extract<__m128i>(v, i)); });
}
inline __m256i _mm512_cvtps_ph(__m512 v, int mode) {
  auto half = [&](int i) {
    const __m256 x = emulate::extract<__m256>(v, i);
    switch (mode & 7) {
      case 0:
        return _mm256_cvtps_ph(x, 0);
      case 1:
        return _mm256_cvtps_ph(x, 1);
      case 2:
        return _mm256_cvtps_ph(x, 2);
      case 3:
        return _mm256_cvtps_ph(x, 3);
      default:
        return _mm256_cvtps_ph(x, 4);
    }
  };
  return emulate::make<__m128i, __m256i>(half);
}

// BF16.

// The mask_ and maskz_ forms are omitted, because GCC 12 passes on only 8 bits of their 16-bit
// mask.
inline __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
  return emulate::dot_bf16(sum, a, b);
}
inline __m256 _mm256_dpbf16_ps(__m256 sum, __m256bh a, __m256bh b) {
  return emulate::dot_bf16(sum, a, b);
}
inline __m128 _mm_dpbf16_ps(__m128 sum, __m128bh a, __m128bh b) {
  return emulate::dot_bf16(sum, a, b);
}
inline __m256bh _mm512_cvtneps_pbh(__m512 v) {
  return emulate::convert<uint16_t, __m256bh, float>(v, emulate::to_bf16);
}
inline __m128bh _mm256_cvtneps_pbh(__m256 v) {
  return emulate::convert<uint16_t, __m128bh, float>(v, emulate::to_bf16);
}
inline __m512bh _mm512_cvtne2ps_pbh(__m512 high, __m512 low) {
  return emulate::insert(emulate::insert(__m512bh{}, _mm512_cvtneps_pbh(low), 0),
                         _mm512_cvtneps_pbh(high), 1);
}
inline __m512 _mm512_cvtpbh_ps(__m256bh v) {
  return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)v), 16);
}

// Gather, compress, expand, mask registers.

inline __m512i _mm512_i32gather_epi32(__m512i index, const void* base, int scale) {
  auto x = emulate::lanes<int>(index);
  return emulate::make<int, __m512i>([&](int i) {
    int value;
    std::memcpy(&value, static_cast<const char*>(base) + int64_t{x[i]} * scale, sizeof(value));
    return value;
  });
}
inline __m512 _mm512_i32gather_ps(__m512i index, const void* base, int scale) {
  return (__m512)_mm512_i32gather_epi32(index, base, scale);
}
inline __m512i _mm512_maskz_compress_epi32(__mmask16 k, __m512i v) {
  auto x = emulate::lanes<int>(v);
  emulate::Lanes<int, __m512i> out = {};
  for (int i = 0, to = 0; i < 16; ++i)
    if (k >> i & 1) out[to++] = x[i];
  return out;
}
inline __m512i _mm512_maskz_expand_epi32(__mmask16 k, __m512i v) {
  auto x = emulate::lanes<int>(v);
  emulate::Lanes<int, __m512i> out = {};
  for (int i = 0, from = 0; i < 16; ++i)
    if (k >> i & 1) out[i] = x[from++];
  return out;
}
inline __mmask16 _mm512_kand(__mmask16 a, __mmask16 b) { return a & b; }
inline __mmask16 _mm512_kor(__mmask16 a, __mmask16 b) { return a | b; }
inline __mmask16 _mm512_knot(__mmask16 a) { return ~a; }
// Every bit of a result is the parity of the bits of x that a row of the matrix selects, the last
// row for the lowest bit, exclusive or the same bit of b.
inline __m512i _mm512_gf2p8affine_epi64_epi8(__m512i x, __m512i matrix, int b) {
  auto rows = emulate::lanes<uint8_t>(matrix);
  return emulate::convert<uint8_t, __m512i, uint8_t>(x, [&, i = 0](uint8_t v) mutable {
    uint8_t result = 0;
    for (int bit = 0; bit < 8; ++bit) {
      const int parity = __builtin_parity(v & rows[i / 8 * 8 + 7 - bit]);
      result |= static_cast<uint8_t>((parity ^ (b >> bit & 1)) << bit);
    }
    ++i;
    return result;
  });
}
inline __mmask16 _mm512_kunpackb(__mmask16 high, __mmask16 low) { return high << 8 | (low & 255); }
inline __mmask16 _cvtu32_mask16(unsigned x) { return x; }
inline unsigned _cvtmask16_u32(__mmask16 k) { return k; }
inline __mmask64 _cvtu64_mask64(unsigned long long x) { return x; }
inline unsigned long long _cvtmask64_u64(__mmask64 k) { return k; }

#undef EMULATE_MASKED
#undef EMULATE_UNPACK
#undef EMULATE_UNARY
#undef EMULATE_BINARY
#undef EMULATE_FMA
#undef EMULATE_MEMORY
#undef EMULATE_ALIGNED
#undef EMULATE_MOVES
#undef EMULATE_SET
#undef EMULATE_SHIFTS
#undef EMULATE_COMPARE
#undef EMULATE_COMPARES
#undef EMULATE_TESTS
#undef EMULATE_PERMUTE
#undef EMULATE_UNPACKS
#undef EMULATE_CONVERT
#undef EMULATE_NARROW
#undef EMULATE_REDUCE
#undef EMULATE_DOT
#undef EMULATE_DOT_WIDTH

}  // namespace tandem::cpu
