// What the kernels are asked. Each structure is mirrored in calls.py, field by field.

#pragma once

#include <cstdint>
#include <new>

// What every entry may return. Other values are stated beside each entry.
constexpr int DONE = 0, NO_MEMORY = 1;

// f() of an entry. No exception leaves through `extern "C"`: a lack of memory is returned, any other is a bug and ends
// the process.
template <class F>
int guarded(F f) noexcept {
    try {
        return f();
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
}

enum Activation { SILU = 0, GELU_TANH = 1 };

enum Form { F32 = 0, BF16 = 1, F16 = 2, Q4 = 3, Q8 = 4 };  // of weights; the first three are dtypes, too

extern "C" struct Weights {  // a matrix [N, K], row after row; on a grid in the panels of panels.h
    const void* data;
    int64_t outputs, inputs, form, scale_bytes;  // 2 or 4 bytes for each scale and shift of a grid
};

extern "C" struct Product {
    const Weights* w;
    const void *x, *bias;
    void* y;
    int64_t rows, y_row, dtype, threads;  // elements from a row of y to the next; dtype of x, bias and y
};

extern "C" struct Call {  // mirrored by `AttentionCall`
    const void *q, *k, *v;
    void *k_pages, *v_pages, *out;
    const int32_t *lengths, *slots, *page_start, *tail_start, *tail, *pages;  // null `tail_start`: no tails
    int64_t rows, listed_pages, num_pages, heads, kv_heads, dim;
    int64_t q_row, q_head, k_row, k_head, v_row, v_head;  // strides in elements; D has stride 1
    int64_t window;                                       // 0: none
    int64_t dtype;                                        // 0 float32, 1 bfloat16, 2 float16
    int64_t threads;
    float scale;
};

extern "C" struct Norm {  // mirrored by `Norm` in calls.py; no weight: no norm
    const float* weight;
    float eps;
    int32_t plus_one;  // whether 1 is added to each weight
};

extern "C" struct Side {  // linears given the same input, results side by side; mirrored by `Side`
    const Weights* weights[3];
    const float* bias[3];
    int64_t count;
};

extern "C" struct Layer {  // mirrored by `Layer`
    Norm first, second, q_norm, k_norm, after_attention, after_mlp;  // the last two: of what is added to the stream
    Side qkv, o, gate_up, down;  // of no linears where the layer goes without its attention, or its MLP
    void *k_pages, *v_pages;
    int64_t num_pages, heads, kv_heads, dim, window, width, inner;
    int64_t rotary, over_heads, activation;  // elements of a head that turn; whether q_norm and k_norm are of all heads
    int64_t dtype;  // of the model and its pages: 0 float32, 1 bfloat16, 2 float16; x, y and norms are float32 always
    float scale, share;  // of the product of queries and keys; of what a sublayer adds to the stream
};

extern "C" struct Visit {  // mirrored by `Visit`
    const float *x, *cos, *sin;
    float* y;
    const int32_t *lengths, *slots, *page_start, *tail_start, *tail, *pages;  // null `tail_start`: no tails
    int64_t rows, listed_pages, threads;
};

extern "C" struct LayerPages {  // mirrored by `LayerPages`
    void *k_pages, *v_pages;
    int64_t kv_heads, dim;
};

extern "C" struct Move {  // mirrored by `Move`
    const LayerPages* layers;
    const int64_t *sources, *targets;  // slots
    int64_t num_layers, count, num_pages, item;  // item: bytes of an element
};

extern "C" int samewise_linear(const Product* product);
extern "C" int samewise_attend(const Call* call);
extern "C" int samewise_move(const Move* move);
extern "C" int samewise_pack(const float* w, int64_t outputs, int64_t inputs, int64_t form, int64_t lossy, void* q,
                             float* d, float* m, int64_t threads);
extern "C" int samewise_arrange(const void* q, const float* d, const float* m, int64_t outputs, int64_t inputs,
                                int64_t form, int64_t scale_bytes, void* to, int64_t threads);
extern "C" int samewise_layers(const Layer* const* layers, int64_t count, const Visit* visit);
extern "C" int samewise_layer(const Layer* layer, const Visit* visit);
extern "C" int samewise_norm(const Norm* by, const float* x, int64_t rows, int64_t width, float* y);
extern "C" int samewise_rotary(const int64_t* positions, const float* frequencies, int64_t rows, int64_t half,
                               float scale, float* cosines, float* sines);
extern "C" int samewise_row_stats(const float* logits, int64_t rows, int64_t stride, int64_t vocab, int64_t* tokens,
                                  float* tops, float* log_sums, int64_t threads);
extern "C" int samewise_top_ids(const float* logits, int64_t rows, int64_t stride, int64_t vocab, int64_t count,
                                int32_t* ids, int64_t threads);
extern "C" int samewise_top_values(const float* logits, const int64_t* at, int64_t rows, int64_t stride, int64_t vocab,
                                   const float* tops, const float* log_sums, int64_t count, int32_t* ids, float* values,
                                   int64_t threads);
extern "C" int samewise_ranks(const float* logits, const int64_t* at, int64_t rows, int64_t stride, int64_t vocab,
                              const float* tops, const float* log_sums, const int64_t* tokens, int64_t* ranks,
                              int64_t threads);
extern "C" int samewise_scores(const float* logits, int64_t vocab, float temperature, float limit, uint32_t first,
                               uint32_t second, float* scores, int64_t threads);
extern "C" int samewise_masses(const float* gaps, int64_t count, int64_t bits, int64_t* masses);
