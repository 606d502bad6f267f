// What this CPU's cores can multiply and add, for the ceiling of bench/frame_cpu.py: chains of fused
// multiply-adds in registers, as many as keep every unit busy.

#include "../src/samewise/kernels/native/team.h"

namespace {

constexpr int CHAINS = 12 / PARTS;

float chains(int64_t count) {
    Lanes sum[CHAINS];
    const Lanes factor = splat(0.5f), one = splat(1.0f);
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++) sum[i] = splat(float(i));
    for (int64_t k = 0; k < count; k++) {
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++) sum[i] = fma(sum[i], factor, one), pin(sum[i]);
    }
    float total = 0.0f;
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++) total += fold(sum[i]);
    return total;
}

}  // namespace

// Every thread goes through `count` rounds; returns the operations of them all, two for a multiply-add.
extern "C" double samewise_peak(int64_t count, int64_t threads, float* out) {
    for_each(threads, threads, [&](int64_t task, int64_t) { out[task] = chains(count); });
    return 2.0 * 16 * CHAINS * double(count) * double(threads);
}
