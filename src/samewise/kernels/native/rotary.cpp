// Cosines and sines of rotary positions.
//
// What the bits are. For position p and frequency f, both float32: angle = p * f, rounded to float32;
// cos and sin of it in binary64 by `sine_cosine`, rounded to float32, times `scale`. Element d and element
// d + half of a row are equal.

#include "calls.h"
#include "functions.h"
#include "lanes.h"

extern "C" int samewise_rotary(const int64_t* positions, const float* frequencies, int64_t rows, int64_t half,
                               float scale, float* cosines, float* sines) {
    DefaultArithmetic arithmetic;
    for (int64_t row = 0; row < rows; row++) {
        float *c = cosines + row * 2 * half, *s = sines + row * 2 * half;
        for (int64_t d = 0; d < half; d++) {
            const float angle = float(positions[row]) * frequencies[d];
            const Angle at = sine_cosine(double(angle));
            c[d] = c[d + half] = float(at.cosine) * scale;
            s[d] = s[d + half] = float(at.sine) * scale;
        }
    }
    return 0;
}
