// What the CPU kernels share: sixteen lanes, element types, rounding mode, scratch.
//
// Lanes hold sixteen float32 whatever the machine's vectors are, and an operation on them is the IEEE
// operation on each: no bit depends on the instruction set.

#pragma once

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#if !defined(SAMEWISE_PORTABLE) && (defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__)))
#include <immintrin.h>
#elif !defined(SAMEWISE_PORTABLE) && defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

// Compilers stop inlining where a file has grown much: a product then calls a function for every sixteen weights,
// and takes twice as long.
#define INLINE [[gnu::always_inline]] inline

// ---------------------------------------------------------------- sixteen lanes

#if !defined(SAMEWISE_PORTABLE) && defined(__AVX512F__)
constexpr int BLOCK = 12;  // queries whose sums fit in registers together
constexpr int FEW = 8;  // rows of a tile that unpacks its weights for itself
constexpr int TILE_OUTPUTS[FEW + 1] = {0, 8, 8, 8, 4, 4, 4, 4, 2};  // outputs of such a tile, by rows
constexpr bool UNPACK_ONCE = false;  // whether more rows share weights that were unpacked into memory
using Part = __m512;  // the register lanes are kept in, and how many of them
constexpr int PARTS = 1;
INLINE Part load_part(const float* p) { return _mm512_loadu_ps(p); }
INLINE Part fma_part(Part x, Part y, Part z) { return _mm512_fmadd_ps(x, y, z); }
struct Lanes { __m512 a; };
INLINE Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
INLINE void store(float* p, Lanes x) { _mm512_storeu_ps(p, x.a); }
INLINE Lanes splat(float x) { return {_mm512_set1_ps(x)}; }
INLINE Lanes fma(Lanes x, Lanes y, Lanes z) { return {_mm512_fmadd_ps(x.a, y.a, z.a)}; }
INLINE Lanes mul(Lanes x, Lanes y) { return {_mm512_mul_ps(x.a, y.a)}; }
INLINE Lanes load_signed(const uint8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
INLINE Lanes load_bf16(const uint16_t* p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
#elif !defined(SAMEWISE_PORTABLE) && defined(__AVX2__) && defined(__FMA__)
constexpr int BLOCK = 6;
constexpr int FEW = 4;
constexpr int TILE_OUTPUTS[FEW + 1] = {0, 2, 1, 1, 1};
constexpr bool UNPACK_ONCE = true;
using Part = __m256;
constexpr int PARTS = 2;
INLINE Part load_part(const float* p) { return _mm256_loadu_ps(p); }
INLINE Part fma_part(Part x, Part y, Part z) { return _mm256_fmadd_ps(x, y, z); }
struct Lanes { __m256 a, b; };
INLINE Lanes load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void store(float* p, Lanes x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
INLINE Lanes splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE Lanes fma(Lanes x, Lanes y, Lanes z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
INLINE Lanes mul(Lanes x, Lanes y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE Lanes load_bytes(__m128i b) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(b)),
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(b, b)))};
}
INLINE Lanes load_low(const uint8_t* p) {
    return load_bytes(_mm_and_si128(_mm_loadu_si128((const __m128i*)p), _mm_set1_epi8(15)));
}
INLINE Lanes load_high(const uint8_t* p) {
    return load_bytes(
        _mm_and_si128(_mm_srli_epi16(_mm_loadu_si128((const __m128i*)p), 4), _mm_set1_epi8(15)));
}
INLINE Lanes load_signed(const uint8_t* p) {
    __m128i b = _mm_loadu_si128((const __m128i*)p);
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(b)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(b, b)))};
}
INLINE Lanes load_bf16(const uint16_t* p) {
    __m256i a = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    __m256i b = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + 8)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
}
#elif !defined(SAMEWISE_PORTABLE) && defined(__aarch64__)
constexpr int BLOCK = 6;
constexpr int FEW = 4;
constexpr int TILE_OUTPUTS[FEW + 1] = {0, 4, 2, 1, 1};
constexpr bool UNPACK_ONCE = true;
using Part = float32x4_t;
constexpr int PARTS = 4;
INLINE Part load_part(const float* p) { return vld1q_f32(p); }
INLINE Part fma_part(Part x, Part y, Part z) { return vfmaq_f32(z, x, y); }
struct Lanes { float32x4_t a, b, c, d; };
INLINE Lanes load(const float* p) {
    return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)};
}
INLINE void store(float* p, Lanes x) {
    vst1q_f32(p, x.a), vst1q_f32(p + 4, x.b), vst1q_f32(p + 8, x.c), vst1q_f32(p + 12, x.d);
}
INLINE Lanes splat(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x)}; }
INLINE Lanes fma(Lanes x, Lanes y, Lanes z) {
    return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c),
            vfmaq_f32(z.d, x.d, y.d)};
}
INLINE Lanes mul(Lanes x, Lanes y) {
    return {vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b), vmulq_f32(x.c, y.c), vmulq_f32(x.d, y.d)};
}
#else
constexpr int BLOCK = 2;
constexpr int FEW = 4;
constexpr int TILE_OUTPUTS[FEW + 1] = {0, 2, 1, 1, 1};
constexpr bool UNPACK_ONCE = true;
struct Lanes { float a[16]; };
using Part = Lanes;
constexpr int PARTS = 1;
INLINE Lanes load(const float* p) {
    Lanes x;
    std::memcpy(x.a, p, sizeof x.a);
    return x;
}
INLINE void store(float* p, Lanes x) { std::memcpy(p, x.a, sizeof x.a); }
INLINE Lanes splat(float s) {
    Lanes x;
    for (int j = 0; j < 16; j++) x.a[j] = s;
    return x;
}
INLINE Lanes fma(Lanes x, Lanes y, Lanes z) {
    for (int j = 0; j < 16; j++) z.a[j] = __builtin_fmaf(x.a[j], y.a[j], z.a[j]);
    return z;
}
INLINE Part load_part(const float* p) { return load(p); }
INLINE Part fma_part(Part x, Part y, Part z) { return fma(x, y, z); }
INLINE Lanes mul(Lanes x, Lanes y) {
    for (int j = 0; j < 16; j++) x.a[j] = x.a[j] * y.a[j];
    return x;
}
#endif

#if defined(SAMEWISE_PORTABLE) || !(defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__)))
template <class F>
INLINE Lanes gather(F f) {
    float x[16];
    for (int j = 0; j < 16; j++) x[j] = f(j);
    return load(x);
}
INLINE Lanes load_low(const uint8_t* p) {
    return gather([=](int j) { return float(p[j] & 15); });
}
INLINE Lanes load_high(const uint8_t* p) {
    return gather([=](int j) { return float(p[j] >> 4); });
}
INLINE Lanes load_signed(const uint8_t* p) {
    return gather([=](int j) { return float(int8_t(p[j])); });
}
INLINE Lanes load_bf16(const uint16_t* p) {
    return gather([=](int j) {
        uint32_t b = uint32_t{p[j]} << 16;
        float x;
        std::memcpy(&x, &b, 4);
        return x;
    });
}
#endif

// Keep a value in its register: compilers would rather load it again for every use, and loads are scarce.
#if !defined(SAMEWISE_PORTABLE) && defined(__AVX512F__)
INLINE void pin(Part& x) { asm("" : "+v"(x)); }
INLINE void pin(Lanes& x) { pin(x.a); }
#elif !defined(SAMEWISE_PORTABLE) && defined(__AVX2__) && defined(__FMA__)
INLINE void pin(Part& x) { asm("" : "+x"(x)); }
INLINE void pin(Lanes& x) { pin(x.a), pin(x.b); }
#elif !defined(SAMEWISE_PORTABLE) && defined(__aarch64__)
INLINE void pin(Part& x) { asm("" : "+w"(x)); }
INLINE void pin(Lanes& x) { pin(x.a), pin(x.b), pin(x.c), pin(x.d); }
#else
INLINE void pin(Lanes&) {}
#endif

// 16 -> 8 -> 4 -> 2 -> 1: lane j with lane j + half.
#if !defined(SAMEWISE_PORTABLE) && (defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__)))
INLINE float fold(Lanes x) {
#if defined(__AVX512F__)
    __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x.a), 1));
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x.a), high);
#else
    __m256 eight = _mm256_add_ps(x.a, x.b);
#endif
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
#else
INLINE float fold(Lanes x) {
    float v[16];
    store(v, x);
    for (int half = 8; half > 0; half /= 2)
        for (int j = 0; j < half; j++) v[j] = v[j] + v[j + half];
    return v[0];
}
#endif

// ---------------------------------------------------------------- element types

INLINE uint32_t bits_of(float x) {
    uint32_t b;
    std::memcpy(&b, &x, 4);
    return b;
}
INLINE float float_of(uint32_t b) {
    float x;
    std::memcpy(&x, &b, 4);
    return x;
}

// exp(given) for given <= 0; 0 below exp(-87).
INLINE float exp_below(float given) {
    constexpr float LOG2E = 0x1.715476p+0f, LN2_HIGH = 0x1.62e4p-1f, LN2_LOW = 0x1.7f7d1cp-20f;
    constexpr float SHIFT = 0x1.8p23f;  // adding it rounds to an integer, kept in the low bits
    float x = given < -87.0f ? -87.0f : given;
    float shifted = __builtin_fmaf(x, LOG2E, SHIFT);
    float n = shifted - SHIFT;
    float r = __builtin_fmaf(n, -LN2_LOW, __builtin_fmaf(n, -LN2_HIGH, x));
    float y = __builtin_fmaf(1.9875691500e-4f, r, 1.3981999507e-3f);
    y = __builtin_fmaf(y, r, 8.3334519073e-3f);
    y = __builtin_fmaf(y, r, 4.1665795894e-2f);
    y = __builtin_fmaf(y, r, 1.6666665459e-1f);
    y = __builtin_fmaf(y, r, 5.0000001201e-1f);
    y = __builtin_fmaf(y, r * r, r) + 1.0f;
    float power = float_of((bits_of(shifted) + 127u) << 23);
    return given < -87.0f ? 0.0f : y * power;
}

struct Float32 {
    using Stored = float;
    static float widen(float x) { return x; }
    static float narrow(float x) { return x; }
};

struct BFloat16 {
    using Stored = uint16_t;
    static float widen(uint16_t h) { return float_of(uint32_t{h} << 16); }
    static uint16_t narrow(float x) {
        uint32_t b = bits_of(x);
        if ((b & 0x7fffffff) > 0x7f800000) return uint16_t(b >> 16 | 0x40);  // keep NaN a NaN
        return uint16_t((b + 0x7fff + (b >> 16 & 1)) >> 16);
    }
};

struct Float16 {
    using Stored = uint16_t;
    static float widen(uint16_t h) {
        uint32_t m = uint32_t(h & 0x7fff) << 13;
        uint32_t normal = m + (112u << 23);
        uint32_t small = bits_of(float_of(m + (113u << 23)) - float_of(113u << 23));  // subnormal or zero
        uint32_t b = m < (1u << 23) ? small : m >= 0x0f800000 ? m | 0x7f800000 : normal;
        return float_of(b | uint32_t(h & 0x8000) << 16);
    }
    static uint16_t narrow(float x) {
        uint32_t b = bits_of(x), sign = b >> 16 & 0x8000;
        b &= 0x7fffffff;
        if (b > 0x7f800000) return uint16_t(sign | 0x7e00);
        if (b >= 0x47800000) return uint16_t(sign | 0x7c00);
        // One unit in the last place of 0.5f is the smallest float16: the addition does the rounding.
        if (b < 0x38800000) return uint16_t(sign | (bits_of(float_of(b) + 0.5f) - 0x3f000000));
        return uint16_t(sign | (b - (112u << 23) + 0xfff + (b >> 13 & 1)) >> 13);
    }
};

// An element of one type as one of another: as it is where they are the same.
template <class From, class To>
INLINE typename To::Stored converted(typename From::Stored x) {
    if constexpr (std::is_same_v<From, To>) return x;
    else return To::narrow(From::widen(x));
}

// The float32 value that an element of T would hold.
template <class T>
INLINE float rounded(float x) { return T::widen(T::narrow(x)); }

template <class T>
const float* widened(const typename T::Stored* x, int64_t n, float* room) {
    if constexpr (std::is_same_v<T, Float32>) return x;
    for (int64_t i = 0; i < n; i++) room[i] = T::widen(x[i]);
    return room;
}

// ---------------------------------------------------------------- weights as lanes

#if !defined(SAMEWISE_PORTABLE) && defined(__F16C__) && (defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__)))
INLINE void load_eight_halves(const uint8_t* p, float* to) {
    _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)));
}
INLINE Lanes load_f16(const uint16_t* p) {
#if defined(__AVX512F__)
    return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))};
#else
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
#endif
}
#else
INLINE void load_eight_halves(const uint8_t* p, float* to) {
    for (int i = 0; i < 8; i++) {
        uint16_t half;
        std::memcpy(&half, p + 2 * i, 2);
        to[i] = Float16::widen(half);
    }
}
INLINE Lanes load_f16(const uint16_t* p) {
    float x[16];
    for (int j = 0; j < 16; j++) x[j] = Float16::widen(p[j]);
    return load(x);
}
#endif

// fma(q, d, m) of 32 levels of four bits, in 16 bytes whose low nibbles come first.
#if !defined(SAMEWISE_PORTABLE) && defined(__AVX512F__)
INLINE void grid_of_16(const uint8_t* q, float d, float m, Lanes& low, Lanes& high) {
    // The sixteen values there are, looked up by the low four bits of each lane.
    const __m512 levels = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 values = _mm512_fmadd_ps(levels, _mm512_set1_ps(d), _mm512_set1_ps(m));
    const __m512i b = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)q));
    low = {_mm512_permutexvar_ps(b, values)};
    high = {_mm512_permutexvar_ps(_mm512_srli_epi32(b, 4), values)};
}
#else
INLINE void grid_of_16(const uint8_t* q, float d, float m, Lanes& low, Lanes& high) {
    low = fma(load_low(q), splat(d), splat(m));
    high = fma(load_high(q), splat(d), splat(m));
}
#endif

// out[i] = fold(x[i]) for N of them.
#if !defined(SAMEWISE_PORTABLE) && (defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__)))
INLINE __m256 fold_to_eight(Lanes x) {
#if defined(__AVX512F__)
    return _mm256_add_ps(_mm512_castps512_ps256(x.a),
                         _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x.a), 1)));
#else
    return _mm256_add_ps(x.a, x.b);
#endif
}
INLINE __m256 fold_two_to_four(Lanes x, Lanes y) {
    const __m256 a = fold_to_eight(x), b = fold_to_eight(y);
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}
INLINE __m256 fold_four_to_two(const Lanes* x) {
    const __m256 a = fold_two_to_four(x[0], x[1]), b = fold_two_to_four(x[2], x[3]);
    return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xEE));
}
template <int N>
INLINE void fold_many(const Lanes* x, float* out) {
#pragma GCC unroll 8
    for (int i = 0; i + 8 <= N; i += 8) {
        const __m256 a = fold_four_to_two(x + i), b = fold_four_to_two(x + i + 4);
        const __m256 sums = _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xDD));
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        _mm256_storeu_ps(out + i, _mm256_permutevar8x32_ps(sums, order));
    }
#pragma GCC unroll 8
    for (int i = N / 8 * 8; i < N; i++) out[i] = fold(x[i]);
}
#else
template <int N>
INLINE void fold_many(const Lanes* x, float* out) {
    for (int i = 0; i < N; i++) out[i] = fold(x[i]);
}
#endif

// ---------------------------------------------------------------- rounding mode, scratch

// Rounding and subnormals as IEEE says, whatever the host program chose for this thread.
struct DefaultArithmetic {
    std::fenv_t saved;
    DefaultArithmetic() { std::fegetenv(&saved), std::fesetenv(FE_DFL_ENV); }
    ~DefaultArithmetic() { std::fesetenv(&saved); }
};

// Floats that outlive the call, so that a pass of many layers does not fault its pages in again and again.
float* scratch(int64_t len) {
    thread_local std::unique_ptr<float[]> room;
    thread_local int64_t room_len = 0;
    if (len > room_len) {
        room_len = 0;
        room.reset();
        room.reset(new float[len + 16]);
        room_len = len;
    }
    auto start = (reinterpret_cast<uintptr_t>(room.get()) + 63) & ~uintptr_t{63};  // whole cache lines
    return reinterpret_cast<float*>(start);
}

}  // namespace
