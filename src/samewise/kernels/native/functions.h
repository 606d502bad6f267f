// Logarithm, sine and cosine in binary64, as fixed sequences of IEEE operations: no bit comes from a libm.
//
// Each is a short series evaluated in the order written, with every fused multiply-add spelled out. The error
// is a few units in the last place of a double, so a result rounded to float32 is almost always the nearest.

#pragma once

#include <cstdint>
#include <cstring>

namespace {

inline uint64_t double_bits(double x) {
    uint64_t b;
    std::memcpy(&b, &x, 8);
    return b;
}
inline double double_of(uint64_t b) {
    double x;
    std::memcpy(&x, &b, 8);
    return x;
}

// log(x) for a positive, normal x.
//
// x = m * 2^k with m in [0.7071, 1.4142); s = (m - 1) / (m + 1); log m = 2 s (1 + z/3 + z^2/5 + ...), z = s^2.
// z < 0.0295, so the first term left out is below 2^-58 of the sum.
inline double log_of(double x) {
    constexpr double LN2_HIGH = 0x1.62e42feep-1, LN2_LOW = 0x1.a39ef35793c76p-33;  // HIGH has 32 bits: k * HIGH is exact
    constexpr uint64_t ROOT_HALF = 0x3fe6a09e00000000, ONE = 0x3ff0000000000000;
    const uint64_t b = double_bits(x) + (ONE - ROOT_HALF);
    // 2^52 with k + 1023 in its lowest bits, so that k becomes a double without an integer conversion.
    const double k = double_of(0x4330000000000000 | (b >> 52)) - (0x1p52 + 1023.0);
    const double f = double_of((b & 0x000fffffffffffff) + ROOT_HALF) - 1.0;
    const double s = f / (2.0 + f), z = s * s;
    double p = 1.0 / 23.0;
    p = __builtin_fma(p, z, 1.0 / 21.0);
    p = __builtin_fma(p, z, 1.0 / 19.0);
    p = __builtin_fma(p, z, 1.0 / 17.0);
    p = __builtin_fma(p, z, 1.0 / 15.0);
    p = __builtin_fma(p, z, 1.0 / 13.0);
    p = __builtin_fma(p, z, 1.0 / 11.0);
    p = __builtin_fma(p, z, 1.0 / 9.0);
    p = __builtin_fma(p, z, 1.0 / 7.0);
    p = __builtin_fma(p, z, 1.0 / 5.0);
    p = __builtin_fma(p, z, 1.0 / 3.0);
    const double twice = 2.0 * s;
    const double low = __builtin_fma(twice * z, p, k * LN2_LOW);
    return k * LN2_HIGH + (twice + low);
}

struct Angle { double sine, cosine; };

// Sine and cosine of |x| < 2^31: x = n * pi/2 + r with |r| <= pi/4, then the Taylor series of r.
inline Angle sine_cosine(double x) {
    constexpr double TWO_BY_PI = 0x1.45f306dc9c883p-1, SHIFT = 0x1.8p52;  // adding SHIFT rounds to an integer
    constexpr double HALF_PI = 0x1.921fb54442d18p+0, HALF_PI_LOW = 0x1.1a62633145c07p-54;
    const double shifted = __builtin_fma(x, TWO_BY_PI, SHIFT), n = shifted - SHIFT;
    const double r = __builtin_fma(-n, HALF_PI_LOW, __builtin_fma(-n, HALF_PI, x)), z = r * r;
    double s = -1.0 / 1307674368000.0;  // 15!
    s = __builtin_fma(s, z, 1.0 / 6227020800.0);
    s = __builtin_fma(s, z, -1.0 / 39916800.0);
    s = __builtin_fma(s, z, 1.0 / 362880.0);
    s = __builtin_fma(s, z, -1.0 / 5040.0);
    s = __builtin_fma(s, z, 1.0 / 120.0);
    s = __builtin_fma(s, z, -1.0 / 6.0);
    s = __builtin_fma(s * z, r, r);
    double c = 1.0 / 20922789888000.0;  // 16!
    c = __builtin_fma(c, z, -1.0 / 87178291200.0);
    c = __builtin_fma(c, z, 1.0 / 479001600.0);
    c = __builtin_fma(c, z, -1.0 / 3628800.0);
    c = __builtin_fma(c, z, 1.0 / 40320.0);
    c = __builtin_fma(c, z, -1.0 / 720.0);
    c = __builtin_fma(c, z, 1.0 / 24.0);
    c = __builtin_fma(c, z, -0.5);
    c = __builtin_fma(c, z, 1.0);
    switch (double_bits(shifted) & 3) {
        case 0: return {s, c};
        case 1: return {c, -s};
        case 2: return {-s, -c};
        default: return {-c, s};
    }
}

}  // namespace
