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
// Forms: float32, bfloat16 and float16 as they are; and two grids over groups of 32 along k, with a scale d and
// shift m: four bits (fma(q, d, m), q = 0 .. 15) and eight (q * d, q = -127 .. 127), in the panels of panels.h.

#include "linear.h"
#include "panels.h"
#include "team.h"

namespace {

using samewise::num_strips;
using samewise::STRIP;
using samewise::whole_lanes;

// Multiply-adds, of at most MOST_ROWS rows, that one thread does in the time it takes to wake another.
constexpr int64_t PRODUCT_ALONE = 120'000, MOST_ROWS = 8;
#if defined(__AVX512F__) && !defined(SAMEWISE_PORTABLE)
constexpr int WIDE = 6;  // outputs of a tile of plain weights
#else
constexpr int WIDE = 3;
#endif
constexpr int64_t MANY = 20;  // rows for which unpacking a grid's weights into memory pays
constexpr int HIGH = 4;  // rows of a tile of plain weights, at most
constexpr int64_t NEAR = 5120;  // floats of x that fit in the nearest cache beside the weights of a tile
constexpr int64_t NEAR_BYTES = 64 << 10;  // of weights that are gone over once for each tile of rows
constexpr int64_t STRETCH = 768;  // of K that a tile goes over once for each part of the lanes

constexpr int BAD_FORM = 2;

// The weights of one output in a form without groups: sixteen from k on, one, and the bytes of one.
struct RowF32 {
    static constexpr int64_t SIZE = 4;
    const float* p;
    RowF32(const Weights& w, int64_t n) : p(static_cast<const float*>(w.data) + n * w.inputs) {}
    Lanes at(int64_t k) const { return load(p + k); }
    float one(int64_t k) const { return p[k]; }
};
struct RowBF16 {
    static constexpr int64_t SIZE = 2;
    const uint16_t* p;
    RowBF16(const Weights& w, int64_t n) : p(static_cast<const uint16_t*>(w.data) + n * w.inputs) {}
    Lanes at(int64_t k) const { return load_bf16(p + k); }
    float one(int64_t k) const { return BFloat16::widen(p[k]); }
};
struct RowF16 {
    static constexpr int64_t SIZE = 2;
    const uint16_t* p;
    RowF16(const Weights& w, int64_t n) : p(static_cast<const uint16_t*>(w.data) + n * w.inputs) {}
    Lanes at(int64_t k) const { return load_f16(p + k); }
    float one(int64_t k) const { return Float16::widen(p[k]); }
};

template <class Row>
Lanes tail(const Row& row, int64_t k, int64_t end) {
    float x[16] = {};
    for (int64_t j = k; j < end; j++) x[j - k] = row.one(j);
    return load(x);
}

// R rows of x (padded to a multiple of 16) by N outputs from n on, both few enough for registers.
template <int R, int N, class Row>
inline void tile(const float* x, int64_t x_row, const Weights& w, int64_t n, float* y, int64_t y_row) {
    const int64_t K = w.inputs;
    const Row first(w, n);
    auto row = [&](int i) {
        Row other = first;
        other.p += i * K;
        return other;
    };
    Lanes sum[R * N], weights[N];
#pragma GCC unroll 32
    for (int i = 0; i < R * N; i++) sum[i] = splat(0.0f);
    int64_t k = 0;
    for (; k + 16 <= K; k += 16) {
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) {
            fetch(reinterpret_cast<const char*>(row(i).p + k) + AHEAD / 2);
            weights[i] = row(i).at(k);
        }
        add_products<R, N>(x + k, x_row, weights, sum);
    }
    if (k < K) {
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) weights[i] = tail(row(i), k, K);
        add_products<R, N>(x + k, x_row, weights, sum);
    }
    float folded[R * N];
    fold_many<R * N>(sum, folded);
    for (int r = 0; r < R; r++)
        for (int i = 0; i < N; i++) y[r * y_row + i] = folded[r * N + i];
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

template <class Row, int R>
void few_rows(const Weights& w, const float* x, int64_t x_row, int64_t n, int64_t end, float* y) {
    constexpr int N = TILE_OUTPUTS[R];
    for (; n + N <= end; n += N, y += N) tile<R, N, Row>(x, x_row, w, n, y, STRIP);
    for (; n < end; n++, y++) tile<R, 1, Row>(x, x_row, w, n, y, STRIP);
}

template <class Row>
void unpack_rows(const Weights& w, int64_t n, int64_t end, float* to) {
    const int64_t K = w.inputs, padded = whole_lanes(K);
    for (; n < end; n++, to += padded) {
        const Row row(w, n);
        for (int64_t k = 0; k < K; k += 16) store(to + k, k + 16 <= K ? row.at(k) : tail(row, k, K));
    }
}

// f(R) with the number of rows as a constant.
template <class F>
void with_few(int64_t rows, F f) {
    switch (rows) {
        case 1: f(std::integral_constant<int, 1>{}); break;
        case 2: f(std::integral_constant<int, 2>{}); break;
        case 3: f(std::integral_constant<int, 3>{}); break;
        case 4: f(std::integral_constant<int, 4>{}); break;
        case 5: f(std::integral_constant<int, std::min(FEW, 5)>{}); break;
        case 6: f(std::integral_constant<int, std::min(FEW, 6)>{}); break;
        case 7: f(std::integral_constant<int, std::min(FEW, 7)>{}); break;
        default: f(std::integral_constant<int, std::min(FEW, 8)>{}); break;
    }
}

// f<kind of the weights>
template <class F>
void with_form(const Weights& w, F f) {
    const bool half = w.scale_bytes == 2;
    switch (w.form) {
        case F32: f(static_cast<RowF32*>(nullptr)); break;
        case BF16: f(static_cast<RowBF16*>(nullptr)); break;
        case F16: f(static_cast<RowF16*>(nullptr)); break;
        case Q4: half ? f(static_cast<BlockQ4<true>*>(nullptr)) : f(static_cast<BlockQ4<false>*>(nullptr)); break;
        default: half ? f(static_cast<BlockQ8<true>*>(nullptr)) : f(static_cast<BlockQ8<false>*>(nullptr)); break;
    }
}

template <class Kind>
constexpr bool IN_ROWS = std::is_same_v<Kind, RowF32> || std::is_same_v<Kind, RowBF16> || std::is_same_v<Kind, RowF16>;

// Bytes of one output's weights.
template <class Kind>
int64_t weight_bytes(int64_t inputs) {
    if constexpr (IN_ROWS<Kind>)
        return inputs * Kind::SIZE;
    else
        return inputs / GROUP * Kind::BYTES / PANEL;
}

// All rows by float32 weights [end - n, padded]. A few rows at a time meet every output, so that they stay in the
// nearest cache and each weight comes from the next one once for all of them.
void many_rows(const float* plain, int64_t padded, const float* x, int64_t x_row, int64_t rows, int64_t outputs,
               float* y) {
    const int64_t block = std::max<int64_t>(HIGH, NEAR / padded / HIGH * HIGH);
    for (int64_t r = 0, some; r < rows; r += some) {
        some = rows - r <= block + 1 ? rows - r : block;  // no lone row at the end: it would be slow
        float* out = y + r * STRIP;
        int64_t n = 0;
        for (; n + WIDE <= outputs; n += WIDE)
            plain_rows<WIDE>(x + r * x_row, x_row, some, plain + n * padded, padded, out + n);
        for (; n < outputs; n++) plain_rows<1>(x + r * x_row, x_row, some, plain + n * padded, padded, out + n);
    }
}

// All rows, as many at a time as a tile may have. Some outputs meet all rows before the next ones do, so that
// their weights come from memory once.
template <class Kind>
void in_tiles(const Weights& w, const float* x, int64_t x_row, int64_t rows, int64_t n, int64_t end, float* y) {
    const int64_t pieces = (rows + FEW - 1) / FEW, bytes = weight_bytes<Kind>(w.inputs);
    const int64_t some = std::max<int64_t>(PANEL, NEAR_BYTES / bytes / PANEL * PANEL);
    for (int64_t to; n < end; y += to - n, n = to) {
        to = std::min(n + some, end);
        for (int64_t i = 0; i < pieces; i++) {
            const int64_t r = rows * i / pieces;
            with_few(rows * (i + 1) / pieces - r, [&](auto count) {
                if constexpr (IN_ROWS<Kind>)
                    few_rows<Kind, count>(w, x + r * x_row, x_row, n, to, y + r * STRIP);
                else
                    panel_rows<Kind, count>(w, x + r * x_row, x_row, n, to, y + r * STRIP, STRIP);
            });
        }
    }
}

// All rows by weights that are unpacked into `room` first.
template <class Kind>
void from_unpacked(const Weights& w, const float* x, int64_t x_row, int64_t rows, int64_t n, int64_t end, float* y,
                   float* room) {
    const int64_t padded = whole_lanes(w.inputs);
    const float* plain = room;
    if constexpr (std::is_same_v<Kind, RowF32>)
        if (w.inputs == padded) plain = static_cast<const float*>(w.data) + n * padded;
    if (plain == room) {
        if constexpr (IN_ROWS<Kind>)
            unpack_rows<Kind>(w, n, end, room);
        else
            unpack_panels<Kind>(w, n, end, room);
    }
    many_rows(plain, padded, x, x_row, rows, end - n, y);
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
int multiply(const Product& p) {
    const Weights& w = *p.w;
    if (!samewise::known_form(w.form)) return BAD_FORM;
    const int64_t K = w.inputs, padded = whole_lanes(K);
    const int64_t own = whole_lanes(p.rows * STRIP + samewise::strip_room(w, p.rows));
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
    const bool few = w.outputs * K * std::min(p.rows, MOST_ROWS) < PRODUCT_ALONE;
    in_region(few ? 1 : p.threads, 1, [&](Team team) {
        float* sums = owned + team.worker * own;
        team.run(num_strips(w.outputs), false, [&](int64_t strip) {
            samewise::strip_sums(w, x, padded, p.rows, strip, sums, sums + p.rows * STRIP);
            finish<T>(p, sums, strip * STRIP, std::min((strip + 1) * STRIP, w.outputs));
        });
    });
    return DONE;
}

}  // namespace

bool samewise::known_form(int64_t form) { return form >= F32 && form <= Q8; }

int64_t samewise::strip_room(const Weights& w, int64_t rows) {
    if (rows <= FEW) return 0;
    return STRIP * whole_lanes(w.inputs);
}

void samewise::strip_sums(const Weights& w, const float* x, int64_t x_row, int64_t rows, int64_t strip, float* sums,
                          float* room) {
    const int64_t n = strip * STRIP, end = std::min(n + STRIP, w.outputs);
    with_form(w, [&](auto* kind) {
        using Kind = std::remove_pointer_t<decltype(kind)>;
        if (rows > FEW && UNPACK_ONCE) return from_unpacked<Kind>(w, x, x_row, rows, n, end, sums, room);
        if constexpr (!IN_ROWS<Kind>) {
            if (rows >= MANY) {
                unpack_panels<Kind>(w, n, end, room);
                return in_tiles<RowF32>({room, end - n, w.inputs, F32, 0}, x, x_row, rows, 0, end - n, sums);
            }
        }
        in_tiles<Kind>(w, x, x_row, rows, n, end, sums);
    });
}

extern "C" int samewise_linear(const Product* product) {
    DefaultArithmetic arithmetic;
    return guarded([&] {
        switch (product->dtype) {
            case F32: return multiply<Float32>(*product);
            case BF16: return multiply<BFloat16>(*product);
            case F16: return multiply<Float16>(*product);
            default: return BAD_FORM;
        }
    });
}
