// Decoder layers in one call: norm, attention, norm, gated MLP; each adds to what came in.
//
// What the bits are. Linears and attention are those of linear.cpp and attention.cpp; between them, in IEEE
// binary32 and for each row by itself,
//
//   norm(x)    = w * (x * (1 / sqrt(s / n + eps))), s = 16 lane sums of x * x, lane = k % 16, each an fma chain
//                from +0 in the order of k, folded 16 -> 8 -> 4 -> 2 -> 1
//   rotate(x)  = (x[d] * cos[d]) + (y * sin[d]), y = -x[d + half] for d < half, else x[d - half]
//   gate(g, u) = (g * sigmoid(s)) * u, sigmoid by e = exp(-|s|) of `exp_below`: 1 / (1 + e), or e / (1 + e)
//                for s < 0; s = g for SiLU, and 1.5957691 * (g + 0.044715 * ((g * g) * g)) for GELU by tanh
//   stream     = x + y * share
//
// so neither the number of rows nor their order nor the threads take part in it. The model's last norm is the
// same function by itself (`samewise_norm`).
//
// A family may go without a norm, norm what it adds to the stream, norm queries and keys over all heads together,
// add 1 to the weights of its norms first, or turn the first elements of a head alone, or none.
//
// In bfloat16 and float16 each result is rounded to the type where modules would round it: every product and sum of
// `rotate`, the norm's quotient before w and the product with it (the product alone where 1 is added to w), g * sigmoid
// and its product with u, linears after their bias, y * share, the stream. Sums and functions are binary32 as above.
//
// All layers run in one parallel region, in phases (team.h): the linears of a side, the rotation of heads, the
// tiles of attention. What costs less than waiting for other threads (the norms and gates of a few rows) is
// computed by every thread for itself.

#include "attention.h"
#include "linear.h"
#include "team.h"

#include <cmath>

namespace {

using samewise::AttentionPlan;
using samewise::num_strips;
using samewise::STRIP;
using samewise::whole_lanes;

constexpr int64_t FEW_ROWS = 4;             // whose norms and gates every thread computes for itself
constexpr int64_t PASS_ALONE = 100'000;     // multiply-adds of a pass not worth waking another thread for
constexpr int64_t ATTENTION_ALONE = 25'000; // multiply-adds of a phase that threads awake need not share
constexpr int64_t ELEMENTS_ALONE = 6'250;   // elements that a phase norms, rotates or gates, likewise
constexpr int64_t MOST_ROWS = 8;            // that a pass's work is estimated by
constexpr int64_t MAX_PHASES = 13;          // of a layer

template <class T>
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
    if (by.plus_one) {
        for (k = 0; k < n; k++) y[k] = rounded<T>((1.0f + by.weight[k]) * (x[k] * by_root));
    } else {
        for (k = 0; k < n; k++) y[k] = rounded<T>(by.weight[k] * rounded<T>(x[k] * by_root));
    }
}

template <class T>
void norm_or_copy(const Norm& by, const float* x, int64_t n, float* y) {
    if (by.weight == nullptr)
        std::copy(x, x + n, y);
    else
        norm<T>(by, x, n, y);
}

template <class T>
void rotate(float* x, const float* cos, const float* sin, int64_t dim) {
    const int64_t half = dim / 2;
    float turned[512];
    for (int64_t d = 0; d < half; d++) {
        turned[d] = rounded<T>(rounded<T>(x[d] * cos[d]) + rounded<T>(-x[d + half] * sin[d]));
        turned[d + half] = rounded<T>(rounded<T>(x[d + half] * cos[d + half]) + rounded<T>(x[d] * sin[d + half]));
    }
    std::memcpy(x, turned, sizeof(float) * dim);
}

template <class T>
inline float gate(float g, float s, float u) {
    float e = exp_below(s < 0.0f ? s : -s);
    float share = (s < 0.0f ? e : 1.0f) / (1.0f + e);
    return rounded<T>(rounded<T>(g * share) * u);
}

template <class T>
void gate_row(const Layer& l, const float* g, const float* u, float* y) {
    if (l.activation == GELU_TANH) {
        for (int64_t k = 0; k < l.inner; k++)
            y[k] = gate<T>(g[k], 1.59576912f * (g[k] + 0.044715f * (g[k] * g[k] * g[k])), u[k]);
    } else {
        for (int64_t k = 0; k < l.inner; k++) y[k] = gate<T>(g[k], g[k], u[k]);
    }
}

// Rows of `len` floats, `stride` apart, of which those after the first `len` are zero.
struct Rows {
    float* data;
    int64_t len, stride;
    float* row(int64_t r) const { return data + r * stride; }
    void end_with_zeros(int64_t r) const { std::fill(row(r) + len, row(r) + stride, 0.0f); }
};

// What a pass writes beside its result. A worker's own part: rows that it computes for itself, and what linears
// and attention need.
struct Room {
    int64_t shared_len = 0, own_len = 0;
    float* data = nullptr;
    float* shared() const { return data; }
    float* own(int64_t worker) const { return data + shared_len + worker * own_len; }
};

int64_t strip_room_of(const Side& side, int64_t rows) {
    int64_t most = 0;
    for (int64_t i = 0; i < side.count; i++) most = std::max(most, samewise::strip_room(*side.weights[i], rows));
    return most;
}

bool known_forms(const Side& side) {
    for (int64_t i = 0; i < side.count; i++)
        if (!samewise::known_form(side.weights[i]->form)) return false;
    return true;
}

Call attention_call(const Layer& l, const Visit& v) {
    const int64_t of_q = l.heads * l.dim, of_k = l.kv_heads * l.dim, all = of_q + 2 * of_k;
    return {nullptr, nullptr, nullptr, l.k_pages, l.v_pages, nullptr,
            v.lengths, v.slots, v.page_start, v.tail_start, v.tail, v.pages,
            v.rows, v.listed_pages, l.num_pages, l.heads, l.kv_heads, l.dim,
            all, l.dim, all, l.dim, all, l.dim,
            l.window, l.dtype, v.threads, l.scale};
}

bool cut_alike(const Layer& a, const Layer& b) {
    return a.window == b.window && a.heads == b.heads && a.kv_heads == b.kv_heads && a.dim == b.dim &&
           a.num_pages == b.num_pages;
}

// One thread's way through a pass of layers of type T.
template <class T>
class Pass {
  public:
    Pass(const Visit& visit, const Room& room, Team& team) : v(visit), room(room), team(team) {}

    void attention(const Layer& l, const AttentionPlan& plan, const float* x) {
        const int64_t of_q = l.heads * l.dim, of_k = l.kv_heads * l.dim, all = of_q + 2 * of_k;
        float* own = room.own(team.worker);
        Rows normed{room.shared(), l.width, whole_lanes(l.width)};
        Rows qkv{normed.data + v.rows * normed.stride, all, all};
        Rows seen{qkv.data + v.rows * qkv.stride, of_q, whole_lanes(of_q)};
        Call call = attention_call(l, v);
        call.q = qkv.data, call.k = qkv.data + of_q, call.v = qkv.data + of_q + of_k, call.out = seen.data;

        own = linears(l.qkv, normed, own,
                      [&](Rows to, int64_t r) { norm_or_copy<T>(l.first, x + r * l.width, l.width, to.row(r)); },
                      [&](int64_t r, int64_t n, float sum) { qkv.row(r)[n] = sum; });
        if (l.over_heads) norm_all_heads(l, qkv);
        team.run(l.heads + l.kv_heads, v.rows * all < ELEMENTS_ALONE, [&](int64_t h) {
            const Norm& by = h < l.heads ? l.q_norm : l.k_norm;
            for (int64_t r = 0; r < v.rows; r++) {
                float* head = qkv.row(r) + h * l.dim;
                if (by.weight != nullptr && !l.over_heads) norm<T>(by, head, l.dim, head);
                rotate<T>(head, v.cos + r * l.rotary, v.sin + r * l.rotary, l.rotary);
            }
            if (h >= l.heads) samewise::write_head(call, plan, h - l.heads);
            if (h == 0) {
                samewise::clear_empty_rows(call, plan);
                for (int64_t r = 0; r < v.rows; r++) seen.end_with_zeros(r);
            }
        });
        team.run(plan.num_tasks(call), plan.work < ATTENTION_ALONE,
                 [&](int64_t task) { samewise::attend_task(call, plan, task, own); });
        add_to_stream(l, l.after_attention, x, [&](auto take) {
            products(l.o, seen, room.own(team.worker), [] {}, take);
        });
    }

    void mlp(const Layer& l, const float* x) {
        Rows normed{room.shared(), l.width, whole_lanes(l.width)};
        Rows both{normed.data + v.rows * normed.stride, 2 * l.inner, 2 * l.inner};
        Rows gated{both.data + v.rows * both.stride, l.inner, whole_lanes(l.inner)};
        linears(l.gate_up, normed, room.own(team.worker),
                [&](Rows to, int64_t r) { norm_or_copy<T>(l.second, x + r * l.width, l.width, to.row(r)); },
                [&](int64_t r, int64_t n, float sum) { both.row(r)[n] = sum; });
        add_to_stream(l, l.after_mlp, x, [&](auto take) {
            linears(l.down, gated, room.own(team.worker),
                    [&](Rows to, int64_t r) { gate_row<T>(l, both.row(r), both.row(r) + l.inner, to.row(r)); }, take);
        });
    }

  private:
    const Visit& v;
    const Room& room;
    Team& team;

    // Linears of one input, whose row r `make` writes: in `shared`, or, of few rows, by each thread for itself.
    // take(r, n, sum) is given every result, n counted over all of them. Returns the part of `own` that is left.
    template <class Make, class Take>
    float* linears(const Side& side, Rows shared, float* own, Make make, Take take) {
        Rows input = shared;
        auto make_row = [&](int64_t r) { make(input, r), input.end_with_zeros(r); };
        if (v.rows <= FEW_ROWS) {
            input.data = own, own += v.rows * input.stride;
            products(side, input, own, [&] { for (int64_t r = 0; r < v.rows; r++) make_row(r); }, take);
        } else {
            team.run(v.rows, v.rows * input.len < ELEMENTS_ALONE, make_row);
            products(side, input, own, [] {}, take);
        }
        return own;
    }

    // Queries and keys of a row, each over all their heads.
    void norm_all_heads(const Layer& l, Rows qkv) {
        const int64_t of_q = l.heads * l.dim, of_k = l.kv_heads * l.dim;
        team.run(v.rows, v.rows * qkv.len < ELEMENTS_ALONE, [&](int64_t r) {
            norm<T>(l.q_norm, qkv.row(r), of_q, qkv.row(r));
            norm<T>(l.k_norm, qkv.row(r) + of_q, of_k, qkv.row(r) + of_q);
        });
    }

    // compute(take) gives take(r, n, sum) every element of what is added, which is normed first where `after` is.
    template <class Compute>
    void add_to_stream(const Layer& l, const Norm& after, const float* x, Compute compute) {
        if (after.weight == nullptr) {
            compute([&](int64_t r, int64_t n, float sum) {
                v.y[r * l.width + n] = rounded<T>(x[r * l.width + n] + rounded<T>(sum * l.share));
            });
            return;
        }
        Rows added{room.shared(), l.width, whole_lanes(l.width)};  // where `normed` was, which is no longer needed
        compute([&](int64_t r, int64_t n, float sum) { added.row(r)[n] = sum; });
        team.run(v.rows, v.rows * l.width < ELEMENTS_ALONE, [&](int64_t r) {
            norm<T>(after, added.row(r), l.width, added.row(r));
            for (int64_t k = 0; k < l.width; k++)
                v.y[r * l.width + k] = rounded<T>(x[r * l.width + k] + rounded<T>(added.row(r)[k] * l.share));
        });
    }

    template <class Before, class Take>
    void products(const Side& side, Rows input, float* own, Before before, Take take) {
        int64_t strips = 0;
        for (int64_t i = 0; i < side.count; i++) strips += num_strips(side.weights[i]->outputs);
        float *sums = own, *rest = own + v.rows * STRIP;
        team.run(strips, false, before, [&](int64_t strip) {
            int64_t i = 0, first = 0;
            for (int64_t n; strip >= (n = num_strips(side.weights[i]->outputs)); i++)
                strip -= n, first += side.weights[i]->outputs;
            const Weights& w = *side.weights[i];
            const float* bias = side.bias[i];
            samewise::strip_sums(w, input.data, input.stride, v.rows, strip, sums, rest);
            const int64_t from = strip * STRIP, count = std::min(STRIP, w.outputs - from);
            for (int64_t r = 0; r < v.rows; r++)
                for (int64_t n = 0; n < count; n++) {
                    const float sum = sums[r * STRIP + n];
                    take(r, first + from + n, rounded<T>(bias == nullptr ? sum : sum + bias[from + n]));
                }
        });
    }
};

// How a pass is cut up, and the room it needs.
struct Plans {
    std::vector<const AttentionPlan*> of_layer;  // null for a layer without attention
    std::vector<std::unique_ptr<AttentionPlan>> all;
    Room room;
    int64_t work = 0;

    // 0, or what a linear returns, or 16 and what attention returns.
    int make(const Layer* const* layers, int64_t count, const Visit& v) {
        int64_t inputs = 0, products = 0, attend = 0;  // what a worker has of each
        for (int64_t i = 0; i < count; i++) {
            const Layer& l = *layers[i];
            const AttentionPlan* plan = nullptr;
            const int64_t qkv = (l.heads + 2 * l.kv_heads) * l.dim, seen = whole_lanes(l.heads * l.dim);
            int64_t shared = whole_lanes(l.width);
            if (l.qkv.count) {
                for (int64_t j = 0; j < i && plan == nullptr; j++)
                    if (of_layer[j] != nullptr && cut_alike(*layers[j], l)) plan = of_layer[j];
                if (plan == nullptr) {
                    all.push_back(std::make_unique<AttentionPlan>());
                    if (int bad = samewise::plan_attention(attention_call(l, v), *all.back())) return 16 + bad;
                    all.back()->out_row = seen;
                    all.back()->floats = true;
                    plan = all.back().get();
                }
                attend = std::max(attend, plan->room_len);
                shared = std::max(shared, whole_lanes(l.width) + qkv + seen);
                work += plan->work;
            }
            if (l.down.count) shared = std::max(shared, whole_lanes(l.width) + 2 * l.inner + whole_lanes(l.inner));
            of_layer.push_back(plan);
            room.shared_len = std::max(room.shared_len, v.rows * shared);
            for (const Side* side : {&l.qkv, &l.o, &l.gate_up, &l.down}) {
                if (!known_forms(*side) || l.dtype != layers[0]->dtype) return 2;
                products = std::max(products, v.rows * STRIP + strip_room_of(*side, v.rows));
                for (int64_t k = 0; k < side->count; k++)
                    work += side->weights[k]->outputs * side->weights[k]->inputs * std::min(v.rows, MOST_ROWS);
            }
            if (v.rows <= FEW_ROWS) inputs = std::max(inputs, v.rows * whole_lanes(std::max(l.width, l.inner)));
        }
        room.own_len = whole_lanes(inputs + std::max(products, attend)) + 32;
        room.shared_len = (room.shared_len + 31) / 32 * 32;
        return 0;
    }
};

template <class T>
void run(const Layer* const* layers, int64_t count, const Visit& v, const Plans& plans, Team& team) {
    Pass<T> pass(v, plans.room, team);
    const float* x = v.x;
    for (int64_t i = 0; i < count; i++) {
        if (const AttentionPlan* plan = plans.of_layer[i]) pass.attention(*layers[i], *plan, x), x = v.y;
        if (layers[i]->down.count) pass.mlp(*layers[i], x), x = v.y;
    }
}

}  // namespace

// `count` layers one after the other; y may be x. 0, or what a linear answered, or 16 and what attention answered.
extern "C" int samewise_layers(const Layer* const* layers, int64_t count, const Visit* visit) {
    const Visit& v = *visit;
    return guarded([&] {
        Plans plans;
        if (const int bad = plans.make(layers, count, v)) return bad;
        const int64_t threads = plans.work < PASS_ALONE ? 1 : v.threads;
        plans.room.data = scratch(plans.room.shared_len + threads * plans.room.own_len);
        in_region(threads, count * MAX_PHASES, [&](Team team) {
            switch (layers[0]->dtype) {
                case F32: run<Float32>(layers, count, v, plans, team); break;
                case BF16: run<BFloat16>(layers, count, v, plans, team); break;
                default: run<Float16>(layers, count, v, plans, team); break;
            }
        });
        return DONE;
    });
}

extern "C" int samewise_layer(const Layer* layer, const Visit* visit) { return samewise_layers(&layer, 1, visit); }

extern "C" int samewise_norm(const Norm* by, const float* x, int64_t rows, int64_t width, float* y) {
    DefaultArithmetic arithmetic;
    for (int64_t row = 0; row < rows; row++) norm<Float32>(*by, x + row * width, width, y + row * width);
    return 0;
}
