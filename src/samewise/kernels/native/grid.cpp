// Put float32 weights on a grid of four or eight bits, and a grid's weights into panels.
//
// A weight's value is fma(q, d, m) with q = 0 .. 15 for four bits, and q * d with q = -127 .. 127 for eight, where
// a group of 32 weights along k shares the float32 scale d and shift m. Nothing but the weights says whether they
// lie on a grid, so the scales that the formats of GGUF would have stored are tried: a float16 that takes the weight
// of largest magnitude to -8 (Q4_0), -16 (Q5_0) or 127 (Q8_0), or the range to 15 (Q4_1), and for K-quants (Q4_K)
// products of a float16 and an integer of six bits.

#include "calls.h"
#include "panels.h"
#include "team.h"

#include <cmath>

namespace {

constexpr int NO_GRID = 3;

float near_half(float x, int step) {  // the float16 nearest to x, or a neighbour
    return Float16::widen(uint16_t(Float16::narrow(x) + step));
}

// The nearest float32 that a product of a float16 and an integer of six bits can be: 17 significant bits.
float near_product(float x) {
    const uint32_t b = bits_of(x);
    return float_of((b + 0x3f + (b >> 7 & 1)) & ~uint32_t{0x7f});
}

struct Grid { float d, m; };

// Put a group on the grid; false if a weight does not lie on it (unless `lossy`).
bool put4(const float* w, Grid g, bool lossy, uint8_t* q) {
    if (!lossy && !std::isfinite(g.d)) return false;  // of infinite weights
    uint8_t level[GROUP];
    for (int k = 0; k < GROUP; k++) {
        float at = g.d != 0.0f ? std::nearbyintf((w[k] - g.m) / g.d) : 0.0f;
        at = at >= 0.0f ? std::min(at, 15.0f) : 0.0f;
        level[k] = uint8_t(at);
        // Level 0 by itself: compilers may take a rounded -0 through an integer and back for -0.
        float value = level[k] ? __builtin_fmaf(at, g.d, g.m) : g.m + 0.0f;
        if (!lossy && bits_of(value) != bits_of(w[k])) return false;
    }
    for (int k = 0; k < 16; k++) q[k] = uint8_t(level[k] | level[k + 16] << 4);
    return true;
}

bool put8(const float* w, float d, bool lossy, uint8_t* q) {
    if (!lossy && !std::isfinite(d)) return false;
    for (int k = 0; k < GROUP; k++) {
        float at = d != 0.0f ? std::nearbyintf(w[k] / d) : 0.0f;
        at = at >= -127.0f ? std::min(at, 127.0f) : -127.0f;
        q[k] = uint8_t(int8_t(at));
        // The zero of a grid with a negative scale is -0, as where the scale multiplies the level 0.
        if (!lossy && bits_of((q[k] ? at : 0.0f) * d) != bits_of(w[k])) return false;
    }
    return true;
}

// Of K-quants: scale and shift are products.
bool group_k4(const float* w, float low, float high, uint8_t* q, float* d, float* m) {
    for (int levels = 15; levels > 0; levels--) {  // between the lowest weight and the highest
        *d = near_product((high - low) / float(levels));
        for (int lowest = 0; lowest + levels <= 15; lowest++) {
            *m = lowest == 0 ? low : near_product(__builtin_fmaf(-float(lowest), *d, low));
            if (put4(w, {*d, *m}, false, q)) return true;
        }
    }
    return false;
}

// `k_quants`: whether the group before was one, so that this is tried first.
bool group4(const float* w, bool lossy, uint8_t* q, float* d, float* m, bool& k_quants) {
    float low = w[0], high = w[0], far = w[0];
    for (int k = 1; k < GROUP; k++) {
        low = std::min(low, w[k]), high = std::max(high, w[k]);
        if (std::fabs(w[k]) > std::fabs(far)) far = w[k];
    }
    if (lossy) {
        *d = (high - low) / 15.0f, *m = low;
        return put4(w, {*d, *m}, true, q);
    }
    if (k_quants && group_k4(w, low, high, q, d, m)) return true;
    for (int step : {0, 1, -1}) {
        for (Grid g : {Grid{near_half((high - low) / 15.0f, step), low},
                       Grid{near_half(far / -8.0f, step), -8.0f * near_half(far / -8.0f, step)}}) {
            *d = g.d, *m = g.m;
            if (put4(w, g, false, q)) return true;
        }
    }
    return k_quants = group_k4(w, low, high, q, d, m);
}

bool group8(const float* w, bool lossy, uint8_t* q, float* d) {
    float far = w[0];
    for (int k = 1; k < GROUP; k++)
        if (std::fabs(w[k]) > std::fabs(far)) far = w[k];
    if (lossy) {
        *d = std::fabs(far) / 127.0f;
        return put8(w, *d, true, q);
    }
    for (int step : {0, 1, -1}) {
        for (float scale : {std::fabs(far) / 127.0f, far / -16.0f}) {
            *d = near_half(scale, step);
            if (put8(w, *d, false, q)) return true;
        }
    }
    for (int level = 15; level > 0; level--) {  // of the far weight, where it is not the outermost
        for (float scale : {far / float(level), far / -float(level)}) {
            *d = near_half(scale, 0);
            if (put8(w, *d, false, q)) return true;
        }
    }
    return false;
}

}  // namespace

// Write float32 weights [N, K] in another form into `q`, `d` and `m`. NO_GRID, with what was written so far
// of no meaning, where a weight would change; `lossy` takes the nearest point of a grid instead.
extern "C" int samewise_pack(const float* w, int64_t outputs, int64_t inputs, int64_t form, int64_t lossy,
                             void* q, float* d, float* m, int64_t threads) {
    if (form != BF16 && form != F16 && inputs % GROUP) return NO_GRID;
    std::atomic<bool> fits{true};
    auto pack = [&](int64_t n, int64_t) {
        const float* row = w + n * inputs;
        if (!fits.load(std::memory_order_relaxed)) return;
        bool fit = true, k_quants = false;
        if (form == BF16 || form == F16) {
            uint16_t* to = static_cast<uint16_t*>(q) + n * inputs;
            for (int64_t k = 0; k < inputs; k++) {
                to[k] = form == BF16 ? BFloat16::narrow(row[k]) : Float16::narrow(row[k]);
                fit &= bits_of(form == BF16 ? BFloat16::widen(to[k]) : Float16::widen(to[k])) == bits_of(row[k]);
            }
            fit |= lossy != 0;
        } else {
            for (int64_t g = 0; g < inputs / GROUP && fit; g++) {
                int64_t at = n * (inputs / GROUP) + g;
                uint8_t* to = static_cast<uint8_t*>(q) + at * (form == Q4 ? 16 : GROUP);
                fit = form == Q4 ? group4(row + g * GROUP, lossy != 0, to, d + at, m + at, k_quants)
                                 : group8(row + g * GROUP, lossy != 0, to, d + at);
            }
        }
        if (!fit) fits = false;
    };
    return guarded([&] {
        for_each(threads, outputs, pack);
        return fits ? DONE : NO_GRID;
    });
}

// The same grid in panels, with scales and shifts of `scale_bytes`: of 2 only where float16 holds them all.
extern "C" int samewise_arrange(const void* q, const float* d, const float* m, int64_t outputs, int64_t inputs,
                                int64_t form, int64_t scale_bytes, void* to, int64_t threads) {
    const int64_t groups = inputs / GROUP, level_bytes = form == Q4 ? GROUP / 2 : GROUP;
    const int64_t block_len = block_bytes(form, scale_bytes), panels = (outputs + PANEL - 1) / PANEL;
    auto put = [&](uint8_t* at, float x) {
        const uint16_t half = Float16::narrow(x);
        scale_bytes == 2 ? std::memcpy(at, &half, 2) : std::memcpy(at, &x, 4);
    };
    auto arrange = [&](int64_t panel, int64_t) {
        for (int64_t g = 0; g < groups; g++) {
            uint8_t* block = static_cast<uint8_t*>(to) + (panel * groups + g) * block_len;
            uint8_t* shifts = block + PANEL * scale_bytes;
            uint8_t* levels = form == Q4 ? shifts + PANEL * scale_bytes : shifts;
            std::memset(block, 0, block_len);
            for (int64_t i = 0; i < PANEL && panel * PANEL + i < outputs; i++) {
                const int64_t from = (panel * PANEL + i) * groups + g;
                put(block + i * scale_bytes, d[from]);
                if (form == Q4) put(shifts + i * scale_bytes, m[from]);
                std::memcpy(levels + i * level_bytes, static_cast<const uint8_t*>(q) + from * level_bytes, level_bytes);
            }
        }
    };
    return guarded([&] {
        for_each(threads, panels, arrange);
        return DONE;
    });
}
