// y = x W' + b on the CPU, for any number of rows, from weights in any form that holds them exactly.
//
// What the bits are. With the exact float32 value w[k] of every weight, whatever form it is kept in,
//
//   lane(j) = fma chain over k = j, j + 16, j + 32, ... of x[k] * w[k], from +0     (j = 0 .. 15)
//   sum     = the lanes folded 16 -> 8 -> 4 -> 2 -> 1
//   y       = sum + b, rounded once to the output type
//
// all in IEEE binary32 as in attention.cpp. The number of rows, their order, the tiling, the threads and
// the form of the weights take no part in it.
//
// Forms: float32, bfloat16 and float16 as they are; and two grids over groups of 32 along k, with a
// float32 scale d and shift m: four bits (fma(q, d, m), q = 0 .. 15, the low nibbles of a group's 16 bytes
// are its first half) and eight (q * d, q = -127 .. 127).

#include "calls.h"
#include "lanes.h"

#include <cmath>

namespace {

constexpr int GROUP = 32;
constexpr int64_t SMALL = 60'000;  // weights not worth waking another thread for
#if defined(__AVX512F__) && !defined(SAMEWISE_PORTABLE)
constexpr int WIDE = 6, TALL = 4, LONE = 8;  // outputs and rows of a tile; outputs for a lone row
#else
constexpr int WIDE = 3, TALL = 2, LONE = 4;
#endif
constexpr int HIGH = 4;  // rows of a tile of plain weights, at most
constexpr int64_t NEAR = 5120;  // floats of x that fit in the nearest cache beside the weights of a tile
constexpr int64_t STRETCH = 768;  // of K that a tile goes over once for each part of the lanes
constexpr int STRIP = 48;  // outputs of one task: a multiple of WIDE and LONE

enum Result { DONE = 0, NO_MEMORY = 1, BAD_FORM = 2, NO_GRID = 3 };

// The weights of one output: half a group of 32, sixteen anywhere (of a form without groups), one.
struct RowF32 {
    const float* p;
    RowF32(const Weights& w, int64_t n) : p(static_cast<const float*>(w.data) + n * w.inputs) {}
    template <int H> Lanes half(int64_t k) const { return load(p + k + H * 16); }
    Lanes at(int64_t k) const { return load(p + k); }
    float one(int64_t k) const { return p[k]; }
};
struct RowBF16 {
    const uint16_t* p;
    RowBF16(const Weights& w, int64_t n) : p(static_cast<const uint16_t*>(w.data) + n * w.inputs) {}
    template <int H> Lanes half(int64_t k) const { return load_bf16(p + k + H * 16); }
    Lanes at(int64_t k) const { return load_bf16(p + k); }
    float one(int64_t k) const { return BFloat16::widen(p[k]); }
};
struct RowF16 {
    const uint16_t* p;
    RowF16(const Weights& w, int64_t n) : p(static_cast<const uint16_t*>(w.data) + n * w.inputs) {}
    template <int H> Lanes half(int64_t k) const { return at(k + H * 16); }
    Lanes at(int64_t k) const {
        float x[16];
        for (int j = 0; j < 16; j++) x[j] = Float16::widen(p[k + j]);
        return load(x);
    }
    float one(int64_t k) const { return Float16::widen(p[k]); }
};
struct RowQ4 {
    const uint8_t* p;
    const float *d, *m;
    RowQ4(const Weights& w, int64_t n)
        : p(static_cast<const uint8_t*>(w.data) + n * w.inputs / 2),
          d(w.scale + n * w.inputs / GROUP),
          m(w.shift + n * w.inputs / GROUP) {}
    template <int H> Lanes half(int64_t k) const {
        int64_t g = k / GROUP;
        return fma(H ? load_high(p + g * 16) : load_low(p + g * 16), splat(d[g]), splat(m[g]));
    }
    Lanes at(int64_t) const { return splat(0.0f); }
    float one(int64_t) const { return 0.0f; }
};
struct RowQ8 {
    const uint8_t* p;
    const float* d;
    RowQ8(const Weights& w, int64_t n)
        : p(static_cast<const uint8_t*>(w.data) + n * w.inputs), d(w.scale + n * w.inputs / GROUP) {}
    template <int H> Lanes half(int64_t k) const {
        return mul(load_signed(p + k + H * 16), splat(d[k / GROUP]));
    }
    Lanes at(int64_t) const { return splat(0.0f); }
    float one(int64_t) const { return 0.0f; }
};

template <class Row>
Lanes tail(const Row& row, int64_t k, int64_t end) {
    float x[16] = {};
    for (int64_t j = k; j < end; j++) x[j - k] = row.one(j);
    return load(x);
}

// R rows of x (padded to a multiple of 16) by N outputs, both few enough for registers.
template <int R, int N, class Row>
inline void tile(const float* x, int64_t x_row, const Row* w, int64_t K, float* y, int64_t y_row) {
    Lanes sum[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) sum[r][n] = splat(0.0f);
    auto step = [&](int64_t k, int n, Lanes wn) {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) sum[r][n] = fma(load(x + r * x_row + k), wn, sum[r][n]);
    };
    int64_t k = 0;
    for (; k + 32 <= K; k += 32) {
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            step(k, n, w[n].template half<0>(k));
            step(k + 16, n, w[n].template half<1>(k));
        }
    }
    for (; k < K; k += 16) {
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) step(k, n, k + 16 <= K ? w[n].at(k) : tail(w[n], k, K));
    }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) y[r * y_row + n] = fold(sum[r][n]);
}

// The same over plain float32 weights [N, K], K a multiple of 16: a stretch of K at a time, near enough to be
// gone over again, and in it one part of the lanes after the other, so that the sums of many rows, N weights
// and an x fit in the registers there are.
template <int R, int N>
inline void plain_tile(const float* x, int64_t x_row, const float* w, int64_t K, float* y, int64_t y_row) {
    constexpr int LEN = 16 / PARTS;
    Part all[PARTS][R][N] = {};
    for (int64_t from = 0; from < K; from += STRETCH) {
        const int64_t to = std::min(from + STRETCH, K);
#pragma GCC unroll 4
        for (int h = 0; h < PARTS; h++) {
            Part sum[R][N];
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
#pragma GCC unroll 8
                for (int n = 0; n < N; n++) sum[r][n] = all[h][r][n];
            for (int64_t k = from + h * LEN; k < to; k += 16) {
                Part wn[N];
#pragma GCC unroll 8
                for (int n = 0; n < N; n++) wn[n] = load_part(w + n * K + k), pin(wn[n]);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    Part xr = load_part(x + r * x_row + k);
                    pin(xr);
#pragma GCC unroll 8
                    for (int n = 0; n < N; n++) sum[r][n] = fma_part(xr, wn[n], sum[r][n]);
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
#pragma GCC unroll 8
                for (int n = 0; n < N; n++) all[h][r][n] = sum[r][n];
        }
    }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) {
            Part lanes[PARTS];
            for (int h = 0; h < PARTS; h++) lanes[h] = all[h][r][n];
            Lanes whole;
            std::memcpy(&whole, lanes, sizeof whole);
            y[r * y_row + n] = fold(whole);
        }
}

// A lone row has too few sums to keep the machine busy: five rows are three and two, not four and one.
template <int N>
void plain_rows(const float* x, int64_t x_row, int64_t rows, const float* w, int64_t K, float* y) {
    while (rows > 0) {
        int64_t some = rows == HIGH + 1 ? HIGH - 1 : std::min<int64_t>(rows, HIGH);
        switch (some) {
            case 4: plain_tile<4, N>(x, x_row, w, K, y, STRIP); break;
            case 3: plain_tile<3, N>(x, x_row, w, K, y, STRIP); break;
            case 2: plain_tile<2, N>(x, x_row, w, K, y, STRIP); break;
            default: plain_tile<1, N>(x, x_row, w, K, y, STRIP); break;
        }
        rows -= some, x += some * x_row, y += some * STRIP;
    }
}

template <class Row, int N>
struct Some {  // N rows of weights from output n on
    alignas(Row) unsigned char room[N * sizeof(Row)];
    Some(const Weights& w, int64_t n) {
        for (int i = 0; i < N; i++) new (room + i * sizeof(Row)) Row(w, n + i);
    }
    const Row* get() const { return reinterpret_cast<const Row*>(room); }
};

template <class Row>
void unpack_row(const Row& row, int64_t K, float* to) {
    int64_t k = 0;
    for (; k + 32 <= K; k += 32) {
        store(to + k, row.template half<0>(k));
        store(to + k + 16, row.template half<1>(k));
    }
    for (; k < K; k += 16) store(to + k, k + 16 <= K ? row.at(k) : tail(row, k, K));
}

// Outputs [n, end) for all rows; y [rows, STRIP] is this task's own.
template <class Row>
void strip(const Weights& w, const float* x, int64_t x_row, int64_t rows, int64_t n, int64_t end, float* y,
           float* wide) {
    const int64_t K = w.inputs, first = n;
    if (rows == 1) {
        for (; n + LONE <= end; n += LONE)
            tile<1, LONE>(x, x_row, Some<Row, LONE>(w, n).get(), K, y + n - first, STRIP);
        for (; n < end; n++) tile<1, 1>(x, x_row, Some<Row, 1>(w, n).get(), K, y + n - first, STRIP);
        return;
    }
    if (rows == TALL && !std::is_same_v<Row, RowF32>) {
        for (; n + WIDE <= end; n += WIDE)
            tile<TALL, WIDE>(x, x_row, Some<Row, WIDE>(w, n).get(), K, y + n - first, STRIP);
    }
    // Unpacked once for all rows. A few rows at a time meet every output, so that they stay in the nearest
    // cache and each weight comes from the next one once for all of them.
    const int64_t padded = (K + 15) / 16 * 16, from = n;
    const float* plain = wide;
    if constexpr (std::is_same_v<Row, RowF32>)
        if (K == padded) plain = static_cast<const float*>(w.data) + from * K;
    if (plain == wide)
        for (int64_t i = from; i < end; i++) unpack_row(Row(w, i), K, wide + (i - from) * padded);
    const int64_t block = std::max<int64_t>(HIGH, NEAR / padded / HIGH * HIGH);
    for (int64_t r = 0, some; r < rows; r += some) {
        some = rows - r <= block + 1 ? rows - r : block;  // no lone row at the end: it would be slow
        float* out = y + r * STRIP - first;
        for (n = from; n + WIDE <= end; n += WIDE)
            plain_rows<WIDE>(x + r * x_row, x_row, some, plain + (n - from) * padded, padded, out + n);
        for (; n < end; n++)
            plain_rows<1>(x + r * x_row, x_row, some, plain + (n - from) * padded, padded, out + n);
    }
}

template <class T>
void finish(const Product& p, const float* sums, int64_t n, int64_t end) {
    using S = typename T::Stored;
    const S* bias = static_cast<const S*>(p.bias);
    for (int64_t r = 0; r < p.rows; r++) {
        S* y = static_cast<S*>(p.y) + r * p.y_row;
        const float* sum = sums + r * STRIP;
        if (bias == nullptr)
            for (int64_t i = n; i < end; i++) y[i] = T::narrow(sum[i - n]);
        else
            for (int64_t i = n; i < end; i++) y[i] = T::narrow(sum[i - n] + T::widen(bias[i]));
    }
}

template <class T>
Result multiply(const Product& p) {
    const Weights& w = *p.w;
    int64_t K = w.inputs, padded = (K + 15) / 16 * 16;
    int64_t own = ((p.rows * STRIP + STRIP * padded) + 31) / 32 * 32;
    float* room = scratch(p.rows * padded + own * p.threads + 32);
    const auto* given = static_cast<const typename T::Stored*>(p.x);
    const float* x = room;
    if constexpr (std::is_same_v<T, Float32>)
        if (K == padded) x = given;
    for (int64_t r = 0; x == room && r < p.rows; r++) {
        for (int64_t k = 0; k < K; k++) room[r * padded + k] = T::widen(given[r * K + k]);
        for (int64_t k = K; k < padded; k++) room[r * padded + k] = 0.0f;
    }
    float* owned = room + (p.rows * padded + 31) / 32 * 32;
    int64_t tasks = (w.outputs + STRIP - 1) / STRIP;
    bool few = w.outputs * K * std::min<int64_t>(p.rows, 8) < SMALL * 2;
    for_each(p.parallel, few ? 1 : p.threads, tasks, [&](int64_t task, int64_t worker) {
        int64_t n = task * STRIP, end = std::min(n + STRIP, w.outputs);
        float* y = owned + worker * own;
        float* wide = y + p.rows * STRIP;
        switch (w.form) {
            case F32: strip<RowF32>(w, x, padded, p.rows, n, end, y, wide); break;
            case BF16: strip<RowBF16>(w, x, padded, p.rows, n, end, y, wide); break;
            case F16: strip<RowF16>(w, x, padded, p.rows, n, end, y, wide); break;
            case Q4: strip<RowQ4>(w, x, padded, p.rows, n, end, y, wide); break;
            default: strip<RowQ8>(w, x, padded, p.rows, n, end, y, wide); break;
        }
        finish<T>(p, y, n, end);
    });
    return DONE;
}

// ---------------------------------------------------------------- finding a grid

float near_half(float x, int step) {  // the float16 nearest to x, or a neighbour
    return Float16::widen(uint16_t(Float16::narrow(x) + step));
}

struct Grid { float d, m; };

// Put a group on the grid; false if a weight does not lie on it (unless `lossy`).
bool put4(const float* w, Grid g, bool lossy, uint8_t* q) {
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
    for (int k = 0; k < GROUP; k++) {
        float at = d != 0.0f ? std::nearbyintf(w[k] / d) : 0.0f;
        at = at >= -127.0f ? std::min(at, 127.0f) : -127.0f;
        q[k] = uint8_t(int8_t(at));
        if (!lossy && bits_of(q[k] ? at * d : 0.0f) != bits_of(w[k])) return false;
    }
    return true;
}

bool group4(const float* w, bool lossy, uint8_t* q, float* d, float* m) {
    float low = w[0], high = w[0], far = w[0];
    for (int k = 1; k < GROUP; k++) {
        low = std::min(low, w[k]), high = std::max(high, w[k]);
        if (std::fabs(w[k]) > std::fabs(far)) far = w[k];
    }
    if (lossy) {
        *d = (high - low) / 15.0f, *m = low;
        return put4(w, {*d, *m}, true, q);
    }
    for (int step : {0, 1, -1}) {
        for (Grid g : {Grid{near_half((high - low) / 15.0f, step), low},
                       Grid{near_half(far / -8.0f, step), -8.0f * near_half(far / -8.0f, step)}}) {
            *d = g.d, *m = g.m;
            if (put4(w, g, false, q)) return true;
        }
    }
    return false;
}

bool group8(const float* w, bool lossy, uint8_t* q, float* d) {
    float far = 0.0f;
    for (int k = 0; k < GROUP; k++) far = std::max(far, std::fabs(w[k]));
    if (lossy) {
        *d = far / 127.0f;
        return put8(w, *d, true, q);
    }
    for (int step : {0, 1, -1}) {
        *d = near_half(far / 127.0f, step);
        if (put8(w, *d, false, q)) return true;
    }
    return false;
}

}  // namespace

extern "C" int samewise_linear(const Product* product) {
    DefaultArithmetic arithmetic;
    try {
        switch (product->dtype) {
            case F32: return multiply<Float32>(*product);
            case BF16: return multiply<BFloat16>(*product);
            case F16: return multiply<Float16>(*product);
            default: return BAD_FORM;
        }
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
}

// Write float32 weights [N, K] in another form into `q`, `d` and `m`. NO_GRID, with what was written so far
// of no meaning, where a weight would change; `lossy` takes the nearest point of a grid instead.
extern "C" int samewise_pack(const float* w, int64_t outputs, int64_t inputs, int64_t form, int64_t lossy,
                             void* q, float* d, float* m, int64_t threads, void* parallel) {
    if (form != BF16 && form != F16 && inputs % GROUP) return NO_GRID;
    std::atomic<bool> fits{true};
    auto pack = [&](int64_t n, int64_t) {
        const float* row = w + n * inputs;
        if (!fits.load(std::memory_order_relaxed)) return;
        bool fit = true;
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
                fit = form == Q4 ? group4(row + g * GROUP, lossy != 0, to, d + at, m + at)
                                 : group8(row + g * GROUP, lossy != 0, to, d + at);
            }
        }
        if (!fit) fits = false;
    };
    for_each(parallel, threads, outputs, pack);
    return fits ? DONE : NO_GRID;
}
