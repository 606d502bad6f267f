// One decoder layer in one call: norm, attention, norm, gated MLP; each adds to what came in.
//
// What the bits are. Linears and attention are those of linear.cpp and attention.cpp; between them, in IEEE
// binary32 and for each row by itself,
//
//   norm(x)    = w * (x * (1 / sqrt(s / n + eps))), s = 16 lane sums of x * x, lane = k % 16, each an fma chain
//                from +0 in the order of k, folded 16 -> 8 -> 4 -> 2 -> 1
//   rotate(x)  = (x[d] * cos[d]) + (y * sin[d]), y = -x[d + half] for d < half, else x[d - half]
//   gate(g, u) = (g * sigmoid(g)) * u, sigmoid by e = exp(-|g|) of `exp_below`: 1 / (1 + e), or e / (1 + e)
//                for g < 0
//
// so neither the number of rows nor their order nor the threads take part in it. The model's last norm is the
// same function by itself (`samewise_norm`).

#include "calls.h"
#include "lanes.h"

#include <cmath>

namespace {

constexpr int64_t FEW = 60'000;  // elements not worth waking another thread for

template <class F>
void each_row(const Visit& v, int64_t width, F f) {
    for_each(v.parallel, v.rows * width < FEW ? 1 : v.threads, v.rows, [&](int64_t row, int64_t) { f(row); });
}

void norm(const Norm& by, const float* x, int64_t n, float* y) {
    Lanes sum = splat(0.0f);
    int64_t k = 0;
    for (; k + 16 <= n; k += 16) sum = fma(load(x + k), load(x + k), sum);
    if (k < n) {
        float rest[16] = {};
        std::memcpy(rest, x + k, sizeof(float) * (n - k));
        sum = fma(load(rest), load(rest), sum);
    }
    const float by_root = 1.0f / std::sqrt(fold(sum) / float(n) + by.eps);
    for (k = 0; k < n; k++) y[k] = by.weight[k] * (x[k] * by_root);
}

void rotate(float* x, const float* cos, const float* sin, int64_t dim) {
    const int64_t half = dim / 2;
    float turned[512];
    for (int64_t d = 0; d < half; d++) {
        turned[d] = x[d] * cos[d] + -x[d + half] * sin[d];
        turned[d + half] = x[d + half] * cos[d + half] + x[d] * sin[d + half];
    }
    std::memcpy(x, turned, sizeof(float) * dim);
}

inline float gate(float g, float u) {
    float e = exp_below(g < 0.0f ? g : -g);
    float share = (g < 0.0f ? e : 1.0f) / (1.0f + e);
    return g * share * u;
}

int linears(const Visit& v, const Side& side, const float* x, float* y, int64_t y_row) {
    for (int64_t i = 0; i < side.count; i++) {
        Product p{side.weights[i], x, side.bias[i], y, v.rows, y_row, F32, v.threads, v.parallel};
        if (int bad = samewise_linear(&p)) return bad;
        y += side.weights[i]->outputs;
    }
    return 0;
}

int attention(const Layer& l, const Visit& v, const float* x, float* y, float* room) {
    const int64_t of_q = l.heads * l.dim, of_k = l.kv_heads * l.dim, all = of_q + 2 * of_k;
    float *normed = room, *qkv = normed + v.rows * l.width, *seen = qkv + v.rows * all;
    each_row(v, l.width, [&](int64_t r) { norm(l.first, x + r * l.width, l.width, normed + r * l.width); });
    if (int bad = linears(v, l.qkv, normed, qkv, all)) return bad;
    each_row(v, all, [&](int64_t r) {
        float* head = qkv + r * all;
        for (int64_t h = 0; h < l.heads + l.kv_heads; h++, head += l.dim) {
            const Norm& own = h < l.heads ? l.q_norm : l.k_norm;
            if (own.weight != nullptr) norm(own, head, l.dim, head);
            rotate(head, v.cos + r * l.dim, v.sin + r * l.dim, l.dim);
        }
    });
    Call call{qkv, qkv + of_q, qkv + of_q + of_k, l.k_pages, l.v_pages, seen,
              v.lengths, v.slots, v.page_start, v.tail_start, v.tail, v.pages,
              v.rows, v.listed_pages, l.num_pages, l.heads, l.kv_heads, l.dim,
              all, l.dim, all, l.dim, all, l.dim,
              l.window, F32, v.threads, v.parallel, l.scale};
    if (int bad = samewise_attend(&call)) return 16 + bad;
    if (int bad = linears(v, l.o, seen, normed, l.width)) return bad;
    each_row(v, l.width, [&](int64_t r) {
        for (int64_t k = r * l.width; k < (r + 1) * l.width; k++) y[k] = x[k] + normed[k];
    });
    return 0;
}

int mlp(const Layer& l, const Visit& v, const float* x, float* y, float* room) {
    float *normed = room, *both = normed + v.rows * l.width;
    each_row(v, l.width, [&](int64_t r) { norm(l.second, x + r * l.width, l.width, normed + r * l.width); });
    if (int bad = linears(v, l.gate_up, normed, both, 2 * l.inner)) return bad;
    float* gated = both + v.rows * 2 * l.inner;
    each_row(v, 8 * l.inner, [&](int64_t r) {
        const float *g = both + r * 2 * l.inner, *u = g + l.inner;
        for (int64_t k = 0; k < l.inner; k++) gated[r * l.inner + k] = gate(g[k], u[k]);
    });
    if (int bad = linears(v, l.down, gated, normed, l.width)) return bad;
    each_row(v, l.width, [&](int64_t r) {
        for (int64_t k = r * l.width; k < (r + 1) * l.width; k++) y[k] = x[k] + normed[k];
    });
    return 0;
}

}  // namespace

// 0, or what a linear answered, or 16 and what attention answered.
extern "C" int samewise_layer(const Layer* layer, const Visit* visit) {
    DefaultArithmetic arithmetic;
    const Layer& l = *layer;
    const Visit& v = *visit;
    try {
        const int64_t of_attention = (2 * l.heads + 2 * l.kv_heads) * l.dim, of_mlp = 3 * l.inner;
        float* room = scratch(v.rows * (l.width + std::max(of_attention, of_mlp)));
        const float* x = v.x;
        if (l.qkv.count) {
            if (int bad = attention(l, v, x, v.y, room)) return bad;
            x = v.y;
        }
        return l.down.count ? mlp(l, v, x, v.y, room) : 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

extern "C" int samewise_norm(const Norm* by, const float* x, int64_t rows, int64_t width, float* y) {
    DefaultArithmetic arithmetic;
    for (int64_t row = 0; row < rows; row++) norm(*by, x + row * width, width, y + row * width);
    return 0;
}
