// What the kernels are asked. Structures mirrored in Python, field by field, where it is said of them.

#pragma once

#include <cstdint>

enum Form { F32 = 0, BF16 = 1, F16 = 2, Q4 = 3, Q8 = 4 };  // of weights; the first three are dtypes, too

extern "C" struct Weights {  // a matrix [N, K]; mirrored by `_Weights` in linear.py
    const void* data;
    const float *scale, *shift;  // [N, K / 32] of a grid
    int64_t outputs, inputs, form;
};

extern "C" struct Product {  // mirrored by `_Product` in linear.py
    const Weights* w;
    const void *x, *bias;
    void* y;
    int64_t rows, y_row, dtype, threads;  // elements from a row of y to the next; dtype of x, bias and y
    void* parallel;
};

extern "C" struct Call {  // mirrored by `_Call` in attention/native.py
    const void *q, *k, *v;
    void *k_pages, *v_pages, *out;
    const int32_t *lengths, *slots, *page_start, *pages;
    int64_t rows, listed_pages, num_pages, heads, kv_heads, dim;
    int64_t q_row, q_head, k_row, k_head, v_row, v_head;  // strides in elements; D has stride 1
    int64_t window;                                       // 0: none
    int64_t dtype;                                        // 0 float32, 1 bfloat16, 2 float16
    int64_t threads;
    void* parallel;  // GOMP_parallel of the OpenMP runtime already in the process, or null
    float scale;
};

extern "C" int samewise_linear(const Product* product);
extern "C" int samewise_attend(const Call* call);
