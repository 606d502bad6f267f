// What sampling reads of a row of logits: its largest, the log of the sum of its exponentials, noisy scores.
//
// What the bits are, for one row x of V float32 logits, by itself:
//
//   top      = the largest x, token = the lowest id that has it (NaN is passed over)
//   exp sum  = blocks of 4096 ids from id 0 on, added in order. A block: 16 lane sums in binary64, lane =
//              id % 16, of exp_below(x - top) in the order of ids from +0, then folded 16 -> 8 -> 4 -> 2 -> 1
//   log sum  = log_of(exp sum), rounded to float32; NaN if a logit is NaN or the largest is infinite
//   gap      = (top - x) / temperature, in float32
//   noise    = -log_of(-log_of(1 - (h + 0.5) / 2^32)) in binary64, rounded to float32; h is the hash of the
//              id under the row's key, all 32-bit integer operations
//   score    = noise - gap; -inf where gap > limit
//   mass     = exp_below(-gap) in units of 2^-bits, rounded down to an integer; 0 if the gap is NaN
//
//   value    = (x - top) - log sum, in float32: the log-probability of an id
//   rank     = 1 + the ids of a larger value, or of the same value and lower
//   top ids  = the ids of the largest values, or of the largest logits, the largest first, equal ones by rising id
//              (NaN is passed over)
//
// so the number of rows, their order, the threads and the instruction set take no part in it.

#include "calls.h"
#include "functions.h"
#include "team.h"

namespace {

constexpr int64_t BLOCK_IDS = 4096;
constexpr int64_t FEW_IDS = 30'000;  // ids not worth waking another thread for
constexpr int64_t MAX_TOP_IDS = 64;
constexpr int BAD_COUNT = 2;
constexpr int64_t STRIDE_IDS = 64;  // ids of which one comparison tells whether any belongs to the top

inline uint32_t scramble(uint32_t h) {
    h ^= h >> 16;
    h *= 0x21F0AAADu;
    h ^= h >> 15;
    h *= 0x735A2D97u;
    return h ^ (h >> 15);
}

inline float noise_of(uint32_t id, uint32_t first, uint32_t second) {
    const uint32_t h = scramble(scramble(id ^ first) + second);
    // 2^52 + h, minus 2^52: h as a double without an integer conversion. Both steps and 1 - w are exact.
    const double w = (double_of(0x4330000000000000 | uint64_t{h}) - 0x1p52 + 0.5) * 0x1p-32;
    return float(-log_of(-log_of(1.0 - w)));
}

float largest(const float* x, int64_t n) {
    float lane[16];
    for (int j = 0; j < 16; j++) lane[j] = -__builtin_inff();
    int64_t k = 0;
    for (; k + 16 <= n; k += 16)
        for (int j = 0; j < 16; j++) lane[j] = x[k + j] > lane[j] ? x[k + j] : lane[j];
    for (int j = 0; k + j < n; j++) lane[j] = x[k + j] > lane[j] ? x[k + j] : lane[j];
    float top = lane[0];
    for (int j = 1; j < 16; j++) top = lane[j] > top ? lane[j] : top;
    return top;
}

double exp_sum(const float* x, int64_t n, float top) {
    double lane[16] = {};
    int64_t k = 0;
    for (; k + 16 <= n; k += 16)
        for (int j = 0; j < 16; j++) lane[j] = lane[j] + double(exp_below(x[k + j] - top));
    for (int j = 0; k + j < n; j++) lane[j] = lane[j] + double(exp_below(x[k + j] - top));
    for (int half = 8; half > 0; half /= 2)
        for (int j = 0; j < half; j++) lane[j] = lane[j] + lane[j + half];
    return lane[0];
}

int64_t first_id(const float* x, int64_t n, float top) {
    for (int64_t k = 0; k < n; k++)
        if (x[k] == top) return k;
    return 0;  // every logit is NaN
}

// A row of logits as log-probabilities, or, with a scale of zeros, as they are.
struct Values {
    const float* x;
    float top, log_sum;
    INLINE float at(int64_t k) const { return (x[k] - top) - log_sum; }
};

// The ids of the `count` largest values, and these; -1 where fewer exceed -inf.
void find_top_ids(Values of, int64_t n, int64_t count, int32_t* ids, float* values) {
    std::fill_n(values, count, -__builtin_inff());
    std::fill_n(ids, count, -1);
    float floor = values[count - 1];
    for (int64_t begin = 0; begin < n; begin += STRIDE_IDS) {
        const int64_t end = std::min(n, begin + STRIDE_IDS);
        if (end - begin == STRIDE_IDS) {
            int any = 0;
            for (int64_t j = 0; j < STRIDE_IDS; j++) any |= of.at(begin + j) > floor;
            if (!any) continue;
        }
        for (int64_t k = begin; k < end; k++) {
            const float value = of.at(k);
            if (!(value > floor)) continue;
            int64_t at = count - 1;
            for (; at > 0 && value > values[at - 1]; at--) values[at] = values[at - 1], ids[at] = ids[at - 1];
            values[at] = value, ids[at] = int32_t(k);
            floor = values[count - 1];
        }
    }
}

int64_t rank_of(Values of, int64_t n, int64_t token) {
    const float own = of.at(token);
    int64_t before = 0;
    for (int64_t begin = 0; begin < n; begin += BLOCK_IDS) {  // counted in 32 bits, which vectors hold more of
        const int64_t end = std::min(n, begin + BLOCK_IDS), lower = std::clamp(token, begin, end);
        int32_t count = 0;
        for (int64_t k = begin; k < lower; k++) count += of.at(k) >= own;
        for (int64_t k = lower; k < end; k++) count += of.at(k) > own;
        before += count;
    }
    return before + 1;
}

}  // namespace

// ids[row][0 .. count) of each of `rows` rows, `stride` elements apart. BAD_COUNT: a count out of range.
extern "C" int samewise_top_ids(const float* logits, int64_t rows, int64_t stride, int64_t vocab, int64_t count,
                                int32_t* ids, int64_t threads) {
    if (count < 1 || count > MAX_TOP_IDS) return BAD_COUNT;
    return guarded([&] {
        for_each(rows * vocab < 8 * FEW_IDS ? 1 : threads, rows, [&](int64_t row, int64_t) {
            float values[MAX_TOP_IDS];
            find_top_ids({logits + row * stride, 0.0f, 0.0f}, vocab, count, ids + row * count, values);
        });
        return DONE;
    });
}

// ids[i][0 .. count) of row at[i] by log-probability, and these. BAD_COUNT: a count out of range.
extern "C" int samewise_top_values(const float* logits, const int64_t* at, int64_t rows, int64_t stride, int64_t vocab,
                                   const float* tops, const float* log_sums, int64_t count, int32_t* ids, float* values,
                                   int64_t threads) {
    if (count < 1 || count > MAX_TOP_IDS) return BAD_COUNT;
    return guarded([&] {
        for_each(rows * vocab < 4 * FEW_IDS ? 1 : threads, rows, [&](int64_t i, int64_t) {
            DefaultArithmetic arithmetic;
            find_top_ids({logits + at[i] * stride, tops[i], log_sums[i]}, vocab, count, ids + i * count, values + i * count);
        });
        return DONE;
    });
}

// The rank of tokens[i] in row at[i].
extern "C" int samewise_ranks(const float* logits, const int64_t* at, int64_t rows, int64_t stride, int64_t vocab,
                              const float* tops, const float* log_sums, const int64_t* tokens, int64_t* ranks,
                              int64_t threads) {
    return guarded([&] {
        for_each(rows * vocab < 4 * FEW_IDS ? 1 : threads, rows, [&](int64_t i, int64_t) {
            DefaultArithmetic arithmetic;
            ranks[i] = rank_of({logits + at[i] * stride, tops[i], log_sums[i]}, vocab, tokens[i]);
        });
        return DONE;
    });
}

// Of each of `rows` rows, `stride` elements apart: token, top and log sum.
extern "C" int samewise_row_stats(const float* logits, int64_t rows, int64_t stride, int64_t vocab,
                                  int64_t* tokens, float* tops, float* log_sums, int64_t threads) {
    return guarded([&] {
        DefaultArithmetic arithmetic;
        const int64_t blocks = (vocab + BLOCK_IDS - 1) / BLOCK_IDS;
        if (rows * vocab < FEW_IDS) threads = 1;
        std::vector<float> maxima(rows * blocks);
        std::vector<double> sums(rows * blocks);
        auto top_of = [&](int64_t row) { return largest(maxima.data() + row * blocks, blocks); };
        in_region(std::min(threads, rows * blocks), 2, [&](Team team) {
            auto each_block = [&](auto f) {
                team.run(rows * blocks, false, [&](int64_t task) {
                    const int64_t row = task / blocks, begin = task % blocks * BLOCK_IDS;
                    f(task, row, logits + row * stride + begin, std::min(BLOCK_IDS, vocab - begin));
                });
            };
            each_block([&](int64_t task, int64_t, const float* x, int64_t n) { maxima[task] = largest(x, n); });
            each_block([&](int64_t task, int64_t row, const float* x, int64_t n) {
                sums[task] = exp_sum(x, n, top_of(row));
            });
        });
        for (int64_t row = 0; row < rows; row++) {
            tops[row] = top_of(row);
            double sum = 0.0;
            int64_t block = 0;
            for (int64_t b = 0; b < blocks; b++) sum = sum + sums[row * blocks + b];
            while (block + 1 < blocks && maxima[row * blocks + block] != tops[row]) block++;
            const int64_t begin = block * BLOCK_IDS;
            tokens[row] = begin + first_id(logits + row * stride + begin, std::min(BLOCK_IDS, vocab - begin), tops[row]);
            log_sums[row] = sum > 0.0 ? float(log_of(sum)) : __builtin_nanf("");
        }
        return DONE;
    });
}

// scores[id] of one row, for a temperature above 0; `limit` may be infinite.
extern "C" int samewise_scores(const float* logits, int64_t vocab, float temperature, float limit, uint32_t first,
                               uint32_t second, float* scores, int64_t threads) {
    DefaultArithmetic arithmetic;
    const float top = largest(logits, vocab);
    const int64_t blocks = (vocab + BLOCK_IDS - 1) / BLOCK_IDS;
    auto score = [&](int64_t block, int64_t) {
        const int64_t end = std::min(vocab, (block + 1) * BLOCK_IDS);
        for (int64_t k = block * BLOCK_IDS; k < end; k++) {
            const float gap = (top - logits[k]) / temperature;
            const float noisy = noise_of(uint32_t(k), first, second) - gap;
            scores[k] = gap > limit ? -__builtin_inff() : noisy;
        }
    };
    return guarded([&] {
        for_each(vocab < FEW_IDS / 4 ? 1 : threads, blocks, score);
        return DONE;
    });
}

// masses[i] of gaps[i].
extern "C" int samewise_masses(const float* gaps, int64_t count, int64_t bits, int64_t* masses) {
    DefaultArithmetic arithmetic;
    const double unit = double_of(uint64_t(1023 + bits) << 52);
    for (int64_t i = 0; i < count; i++) {
        const double mass = double(exp_below(-gaps[i])) * unit;
        masses[i] = mass > 0.0 ? int64_t(mass) : 0;  // what a NaN becomes as an integer differs between CPUs
    }
    return 0;
}
