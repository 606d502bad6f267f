// Weights on a grid of four or eight bits, as products read them: from one end of memory to the other.
//
// A panel is PANEL outputs; its blocks follow one another along k, each with the panel's weights of a group of
// 32: the outputs' scales, for four bits their shifts, then the levels of one output after the other (of four
// bits: 16 bytes, whose low nibbles are the first half of the group). Scales and shifts are float16 where all of
// them are, exactly, else float32. The last panel is filled up with zeros.

#pragma once

#include "calls.h"
#include "lanes.h"

namespace {

constexpr int GROUP = 32;
constexpr int PANEL = 8;
constexpr int64_t AHEAD = 8192;  // bytes between what is read and what is fetched into the cache meanwhile

inline int64_t block_bytes(int64_t form, int64_t scale_bytes) {
    return PANEL * (form == Q4 ? GROUP / 2 + 2 * scale_bytes : GROUP + scale_bytes);
}
inline const uint8_t* panel_of(const Weights& w, int64_t n) {  // the panel that holds output n
    const int64_t bytes = w.inputs / GROUP * block_bytes(w.form, w.scale_bytes);
    return static_cast<const uint8_t*>(w.data) + n / PANEL * bytes;
}

INLINE void fetch(const void* p) { __builtin_prefetch(p); }

// COUNT scales as float32: in place, or converted into room.
template <bool HALF, int COUNT>
INLINE const float* scales(const uint8_t* p, float* room) {
    if constexpr (!HALF) return reinterpret_cast<const float*>(p);
    for (int i = 0; i < COUNT; i += 8) load_eight_halves(p + 2 * i, room + i);
    // From memory a product loads and repeats a scale in one instruction. Kept in registers, scales are taken apart by
    // shuffles, which wait for the ports that weights are unpacked on: a quarter slower at one row.
    asm("" : "+m"(*reinterpret_cast<float(*)[COUNT]>(room)));
    return room;
}

template <bool HALF>
struct BlockQ4 {
    static constexpr int64_t SCALES = PANEL * (HALF ? 2 : 4), BYTES = 2 * SCALES + PANEL * GROUP / 2;
    alignas(64) float room[2 * PANEL];
    const uint8_t* levels;
    const float* d;
    INLINE explicit BlockQ4(const uint8_t* p) : levels(p + 2 * SCALES), d(scales<HALF, 2 * PANEL>(p, room)) {}
    INLINE void weights(int n, Lanes& low, Lanes& high) const { grid_of_16(levels + n * 16, d[n], d[PANEL + n], low, high); }
};

template <bool HALF>
struct BlockQ8 {
    static constexpr int64_t SCALES = PANEL * (HALF ? 2 : 4), BYTES = SCALES + PANEL * GROUP;
    alignas(64) float room[PANEL];
    const uint8_t* levels;
    const float* d;
    INLINE explicit BlockQ8(const uint8_t* p) : levels(p + SCALES), d(scales<HALF, PANEL>(p, room)) {}
    INLINE void weights(int n, Lanes& low, Lanes& high) const {
        low = mul(load_signed(levels + n * GROUP), splat(d[n]));
        high = mul(load_signed(levels + n * GROUP + 16), splat(d[n]));
    }
};

// sum[r][n] += x[r] * w[n], lane by lane. Of several rows each x is loaded once, of few each weight used at once.
template <int R, int N>
INLINE void add_products(const float* x, int64_t x_row, Lanes* w, Lanes* sum) {
    if (R > 2) {
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) pin(w[n]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        Lanes row = load(x + r * x_row);
        if (R > 2) pin(row);
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) sum[r * N + n] = fma(row, w[n], sum[r * N + n]);
    }
}

// R rows of x by the N outputs of a panel from `first` on.
template <class Block, int R, int N>
inline void panel_tile(const float* x, int64_t x_row, const uint8_t* p, int64_t K, int first, float* y, int64_t y_row) {
    Lanes sum[R * N];
#pragma GCC unroll 32
    for (int i = 0; i < R * N; i++) sum[i] = splat(0.0f);
    for (int64_t k = 0; k < K; k += GROUP, p += Block::BYTES) {
        if (first == 0)
            for (int64_t i = 0; i < Block::BYTES; i += 64) fetch(p + AHEAD + i);
        const Block block(p);
        Lanes low[N], high[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) block.weights(first + n, low[n], high[n]);
        add_products<R, N>(x + k, x_row, low, sum);
        add_products<R, N>(x + k + 16, x_row, high, sum);
    }
    float folded[R * N];
    fold_many<R * N>(sum, folded);
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) y[r * y_row + n] = folded[r * N + n];
}

// At most FEW rows of x by the outputs [n, end), which begin with a panel: y[row][output - n].
template <class Block, int R>
void panel_rows(const Weights& w, const float* x, int64_t x_row, int64_t n, int64_t end, float* y, int64_t y_row) {
    constexpr int N = TILE_OUTPUTS[R];
    for (; n < end; n += PANEL, y += PANEL) {
        const uint8_t* p = panel_of(w, n);
        if (end - n >= PANEL) {
            for (int i = 0; i < PANEL; i += N) panel_tile<Block, R, N>(x, x_row, p, w.inputs, i, y + i, y_row);
        } else {
            float whole[R * PANEL];
            for (int i = 0; i < PANEL; i += N) panel_tile<Block, R, N>(x, x_row, p, w.inputs, i, whole + i, PANEL);
            for (int r = 0; r < R; r++) std::memcpy(y + r * y_row, whole + r * PANEL, sizeof(float) * (end - n));
        }
    }
}

// The outputs [n, end) as float32, row after row of K; n begins a panel.
template <class Block>
void unpack_panels(const Weights& w, int64_t n, int64_t end, float* to) {
    for (; n < end; n += PANEL, to += PANEL * w.inputs) {
        const uint8_t* p = panel_of(w, n);
        const int count = int(std::min<int64_t>(PANEL, end - n));
        for (int64_t k = 0; k < w.inputs; k += GROUP, p += Block::BYTES) {
            for (int64_t i = 0; i < Block::BYTES; i += 64) fetch(p + AHEAD + i);
            const Block block(p);
            for (int i = 0; i < count; i++) {
                Lanes low, high;
                block.weights(i, low, high);
                store(to + i * w.inputs + k, low), store(to + i * w.inputs + k + 16, high);
            }
        }
    }
}

}  // namespace
