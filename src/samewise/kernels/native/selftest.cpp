// Run every kernel on fixed inputs and return digests of the results' bits.
//
// The digests are stored beside this file (expected.py). A library whose digests differ was compiled to
// another arithmetic and is refused, so one set of bits stands for every compiler, instruction set and machine.
// The inputs come from an integer hash: nothing here depends on a library's random numbers.

#include "calls.h"
#include "lanes.h"

#include <string>

namespace {

uint64_t mixed(uint64_t x) {
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

// Numbers of both signs with exponents from 2^(middle - 4) to 2^(middle + 3).
std::vector<float> numbers(int64_t count, uint64_t seed, int middle = 0) {
    std::vector<float> x(count);
    for (int64_t i = 0; i < count; i++) {
        uint64_t h = mixed(seed * 1'000'003 + uint64_t(i));
        uint32_t exponent = uint32_t(127 + middle - 4) + uint32_t(h >> 32 & 7);
        x[i] = float_of(uint32_t(h >> 63) << 31 | exponent << 23 | uint32_t(h & 0x7fffff));
    }
    return x;
}

// FNV-1a over bytes.
struct Digest {
    uint64_t value = 0xcbf29ce484222325ull;
    void add(const void* data, size_t size) {
        for (size_t i = 0; i < size; i++)
            value = (value ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001b3ull;
    }
    template <class T>
    void add(const std::vector<T>& x) { add(x.data(), x.size() * sizeof(T)); }
};

// Raise what an entry returned: a digest of what it did not compute would tell of other bits.
void check(int status) {
    if (status != DONE) throw std::bad_alloc();
}

int64_t size_of(int64_t form) { return form == F32 ? 4 : 2; }

std::vector<unsigned char> as_form(const std::vector<float>& x, int64_t form) {
    std::vector<unsigned char> data(x.size() * size_of(form));
    for (size_t i = 0; i < x.size(); i++) {
        if (form == F32) reinterpret_cast<float*>(data.data())[i] = x[i];
        if (form == BF16) reinterpret_cast<uint16_t*>(data.data())[i] = BFloat16::narrow(x[i]);
        if (form == F16) reinterpret_cast<uint16_t*>(data.data())[i] = Float16::narrow(x[i]);
    }
    return data;
}

struct Packed {
    std::vector<unsigned char> data, panels;  // of a grid: its levels row after row, and in panels with the rest
    std::vector<float> scale, shift;
    Weights weights;
    Packed(int64_t form, int64_t outputs, int64_t inputs, uint64_t seed, int64_t scale_bytes = 4, int middle = -2) {
        std::vector<float> w = numbers(outputs * inputs, seed, middle);
        weights = {nullptr, outputs, inputs, form, scale_bytes};
        if (form == Q4 || form == Q8) {
            data.resize(outputs * inputs / (form == Q4 ? 2 : 1));
            scale.resize(outputs * inputs / 32), shift.resize(scale.size());
            check(samewise_pack(w.data(), outputs, inputs, form, 1, data.data(), scale.data(), shift.data(), 1));
            const int64_t blocks = (outputs + 7) / 8 * (inputs / 32);
            panels.resize(blocks * 8 * (form == Q4 ? 16 + 2 * scale_bytes : 32 + scale_bytes));
            check(samewise_arrange(data.data(), scale.data(), shift.data(), outputs, inputs, form, scale_bytes,
                             panels.data(), 1));
        } else {
            data = as_form(w, form);
        }
        weights.data = panels.empty() ? data.data() : panels.data();
    }
};

void linears(Digest& digest, int64_t threads, int64_t form, int64_t inputs) {
    const int64_t outputs = 101, dtype = form == BF16 || form == F16 ? form : int64_t{F32};
    Packed packed(form, outputs, inputs, 1);
    auto bias = as_form(numbers(outputs, 2), dtype);
    for (int64_t rows : {1, 2, 5, 17}) {
        auto x = as_form(numbers(rows * inputs, 3), dtype);
        std::vector<unsigned char> y(rows * outputs * size_of(dtype));
        Product p{&packed.weights, x.data(), rows % 2 ? bias.data() : nullptr, y.data(), rows, outputs, dtype,
                  threads};
        check(samewise_linear(&p));
        digest.add(y);
    }
    digest.add(packed.data), digest.add(packed.scale);
}

// Every number of rows that has a tile of its own, and one more; scales of two bytes.
void few_rows(Digest& digest, int64_t threads) {
    const int64_t outputs = 53, inputs = 160;
    for (int64_t form : {F32, BF16, F16, Q4, Q8}) {
        Packed packed(form, outputs, inputs, 40, 2);
        for (int64_t rows = 1; rows <= 9; rows++) {
            auto x = numbers(rows * inputs, 41);
            std::vector<float> y(rows * outputs);
            Product p{&packed.weights, x.data(), nullptr, y.data(), rows, outputs, F32, threads};
            check(samewise_linear(&p));
            digest.add(y);
        }
    }
}

// Rows that are more than a tile has, from weights that are unpacked for them: on some CPUs from 20 rows on, on others
// from 5; 43 rows end in a part of a block.
void many_rows(Digest& digest, int64_t threads) {
    const int64_t outputs = 53, inputs = 160;
    for (int64_t form : {F32, BF16, F16, Q4, Q8}) {
        Packed packed(form, outputs, inputs, 50, form == Q4 ? 2 : 4);
        for (int64_t rows : {19, 20, 43}) {
            auto x = numbers(rows * inputs, 51);
            std::vector<float> y(rows * outputs);
            Product p{&packed.weights, x.data(), nullptr, y.data(), rows, outputs, F32, threads};
            check(samewise_linear(&p));
            digest.add(y);
        }
    }
}

// Pages 1 .. 6 of a sequence of 96 positions; the last `rows` of them are asked for.
struct Context {
    std::vector<int32_t> lengths, slots, starts, pages{1, 2, 3, 4, 5, 6}, tail_start, tail;  // no tails: empty
    const int32_t* tail_starts() const { return tail_start.empty() ? nullptr : tail_start.data(); }
    const int32_t* tails() const { return tail.empty() ? nullptr : tail.data(); }
    explicit Context(int64_t rows) : lengths(rows), slots(rows), starts(rows, 0) {
        for (int64_t r = 0; r < rows; r++) {
            int64_t position = 90 - rows + r;
            lengths[r] = int32_t(position + 1);
            slots[r] = int32_t(pages[position / 16] * 16 + position % 16);
        }
    }
    // A draft tree after 62 positions. Its nodes' slots follow one another, so a path's keys stand in other places than
    // their positions, over the end of a page; the first row has no tail.
    static Context of_tree() {
        constexpr int32_t FIRST = 61, PARENTS[] = {-1, 0, 1, 1, 0, 3, 5};
        Context tree(std::size(PARENTS));
        for (int32_t r = 0; r < int32_t(std::size(PARENTS)); r++) {
            std::vector<int32_t> path;
            for (int32_t node = r; node >= 0; node = PARENTS[node]) path.insert(path.begin(), node);
            const int32_t position = FIRST + int32_t(path.size()) - 1, slot = FIRST + r;
            tree.lengths[r] = position + 1;
            tree.slots[r] = tree.pages[slot / 16] * 16 + slot % 16;
            tree.tail_start.push_back(r == 0 ? position + 1 : FIRST);
            tree.tail.push_back(int32_t(tree.pages.size()));
            for (int32_t node : path) tree.pages.push_back(tree.slots[node]);
        }
        return tree;
    }
};

// Keys that rows write are read by later ones, so pages are part of the digest.
void attention(Digest& digest, int64_t threads, int64_t dtype, int64_t window, const std::vector<Context>& contexts) {
    const int64_t heads = 6, kv_heads = 2, dim = 40, num_pages = 7;
    auto k_pages = as_form(numbers(num_pages * kv_heads * 16 * dim, 4, -1), dtype);
    auto v_pages = as_form(numbers(num_pages * kv_heads * 16 * dim, 5), dtype);
    for (const Context& context : contexts) {
        const int64_t rows = int64_t(context.lengths.size());
        auto q = as_form(numbers(rows * heads * dim, 6, -1), dtype), k = as_form(numbers(rows * kv_heads * dim, 7, -1), dtype),
             v = as_form(numbers(rows * kv_heads * dim, 8), dtype);
        std::vector<unsigned char> out(rows * heads * dim * size_of(dtype));
        Call call{q.data(), k.data(), v.data(), k_pages.data(), v_pages.data(), out.data(),
                  context.lengths.data(), context.slots.data(), context.starts.data(), context.tail_starts(),
                  context.tails(), context.pages.data(), rows, int64_t(context.pages.size()), num_pages, heads,
                  kv_heads, dim, heads * dim, dim, kv_heads * dim, dim, kv_heads * dim, dim,
                  window, dtype, threads, 0.125f};
        check(samewise_attend(&call));
        digest.add(out);
    }
    digest.add(k_pages), digest.add(v_pages);
}

const std::vector<Context> PLAIN_ROWS{Context(1), Context(3), Context(20)};

// Slots that are sources and targets, of pages with elements of two bytes and of four.
void move(Digest& digest, int64_t) {
    const int64_t kv_heads = 2, dim = 24, num_pages = 4, len = num_pages * kv_heads * 16 * dim;
    const std::vector<int64_t> sources{17, 18, 40, 63, 5}, targets{18, 17, 5, 16, 33};
    for (int64_t dtype : {F32, BF16}) {
        auto k = as_form(numbers(len, 60), dtype), v = as_form(numbers(len, 61), dtype);
        const LayerPages layer{k.data(), v.data(), kv_heads, dim};
        const Move slots{&layer, sources.data(), targets.data(), 1, int64_t(sources.size()), num_pages, size_of(dtype)};
        check(samewise_move(&slots));
        digest.add(k), digest.add(v);
    }
}

enum class LayerKind { PLAIN, HEAD_NORMS, SANDWICH, AFTER };

template <class T>
void round_to(std::vector<float>& x) {
    for (float& one : x) one = rounded<T>(one);
}

// What a model of this dtype passes in: float32 that the dtype can hold.
void as_dtype(std::vector<float>& x, int64_t dtype) {
    if (dtype == BF16) round_to<BFloat16>(x);
    if (dtype == F16) round_to<Float16>(x);
}

void layer(Digest& digest, int64_t threads, LayerKind kind, int64_t dtype, const std::vector<Context>& contexts) {
    const bool with_norms = kind != LayerKind::PLAIN;
    const int64_t width = 40, heads = 4, kv_heads = 2, dim = 24, inner = 72, num_pages = 7;
    const int middle = dtype == F32 ? -2 : -4;  // so that every product is finite in float16
    auto first = numbers(width, 10), second = numbers(width, 11), of_q = numbers(dim, 12), of_k = numbers(dim, 13);
    Packed q(F32, heads * dim, width, 14), k(BF16, kv_heads * dim, width, 15), v(F16, kv_heads * dim, width, 16),
        o(Q8, width, heads * dim, 17), gate(F32, inner, width, 18, 4, middle), up(F32, inner, width, 19, 4, middle),
        down(F32, width, inner, 20);
    auto bias = numbers(heads * dim, 21), after = numbers(width, 26), of_all = numbers((heads + kv_heads) * dim, 27);
    auto k_pages = as_form(numbers(num_pages * kv_heads * 16 * dim, 22), dtype),
         v_pages = as_form(numbers(num_pages * kv_heads * 16 * dim, 23), dtype);
    for (auto* weights : {&first, &second, &of_q, &of_k, &bias, &after, &of_all}) as_dtype(*weights, dtype);
    Layer l{};
    l.first = {first.data(), 1e-5f}, l.second = {second.data(), 1e-6f};
    if (with_norms) l.q_norm = {of_q.data(), 1e-6f}, l.k_norm = {of_k.data(), 1e-6f};
    l.qkv = {{&q.weights, &k.weights, &v.weights}, {bias.data(), nullptr, nullptr}, 3};
    l.o = {{&o.weights}, {}, 1}, l.gate_up = {{&gate.weights, &up.weights}, {}, 2}, l.down = {{&down.weights}, {}, 1};
    l.k_pages = k_pages.data(), l.v_pages = v_pages.data();
    l.num_pages = num_pages, l.heads = heads, l.kv_heads = kv_heads, l.dim = dim, l.window = with_norms ? 24 : 0;
    l.width = width, l.inner = inner, l.scale = 0.2f, l.rotary = dim, l.share = 1.0f, l.dtype = dtype;
    const Norm last = l.first;
    if (kind == LayerKind::SANDWICH) {  // as Gemma 3
        l.after_attention = {after.data(), 1e-6f, 1}, l.after_mlp = {first.data(), 1e-6f, 1};
        l.first.plus_one = l.q_norm.plus_one = 1, l.activation = GELU_TANH, l.rotary = 16;
    }
    if (kind == LayerKind::AFTER) {  // as OLMo 2, its share as Granite's
        l.after_attention = l.first, l.after_mlp = l.second, l.first = l.second = {};
        l.q_norm = {of_all.data(), 1e-6f}, l.k_norm = {of_all.data() + heads * dim, 1e-6f};
        l.over_heads = 1, l.rotary = 0, l.share = 0.7f;
    }
    for (const Context& context : contexts) {
        const int64_t rows = int64_t(context.lengths.size());
        auto x = numbers(rows * width, 24);
        as_dtype(x, dtype);
        std::vector<int64_t> positions(context.lengths.begin(), context.lengths.end());
        std::vector<float> frequencies = numbers(dim / 2, 25), cosines(rows * dim), sines(rows * dim), y(x.size()), z(x.size());
        samewise_rotary(positions.data(), frequencies.data(), rows, dim / 2, 1.25f, cosines.data(), sines.data());
        as_dtype(cosines, dtype), as_dtype(sines, dtype);
        Visit visit{x.data(), cosines.data(), sines.data(), y.data(), context.lengths.data(), context.slots.data(),
                    context.starts.data(), context.tail_starts(), context.tails(), context.pages.data(), rows,
                    int64_t(context.pages.size()), threads};
        check(samewise_layer(&l, &visit));
        samewise_norm(&last, y.data(), rows, width, z.data());
        digest.add(y), digest.add(z);
    }
    digest.add(k_pages), digest.add(v_pages);
}

void layers(Digest& digest, int64_t threads, std::initializer_list<LayerKind> kinds, int64_t dtype = F32) {
    for (LayerKind kind : kinds) layer(digest, threads, kind, dtype, {Context(1), Context(6)});
}

void trees(Digest& digest, int64_t threads) {
    for (int64_t dtype : {F32, BF16, F16})
        for (int64_t window : {0, 24}) attention(digest, threads, dtype, window, {Context::of_tree()});
    layer(digest, threads, LayerKind::PLAIN, F32, {Context::of_tree()});
}

void rotary(Digest& digest, int64_t) {
    std::vector<int64_t> positions;
    for (int64_t p = 0; p < 64; p++) positions.push_back(p * p * p + p);  // up to 250,110
    std::vector<float> frequencies(32), cosines(64 * 64), sines(64 * 64);
    for (int d = 0; d < 32; d++) frequencies[d] = float_of(0x3f800000u - uint32_t(d) * 0x00600000u + uint32_t(d) * 12345u);
    samewise_rotary(positions.data(), frequencies.data(), 64, 32, 1.0f, cosines.data(), sines.data());
    digest.add(cosines), digest.add(sines);
}

void sampling(Digest& digest, int64_t threads) {
    const int64_t rows = 3, vocab = 9001;
    auto logits = numbers(rows * vocab, 30, 1);
    logits[vocab + 17] = 300.0f;  // a token that is certain: its log sum is +0
    std::vector<int64_t> tokens(rows), masses(vocab);
    std::vector<float> tops(rows), sums(rows), scores(vocab), gaps(vocab);
    check(samewise_row_stats(logits.data(), rows, vocab, vocab, tokens.data(), tops.data(), sums.data(), threads));
    digest.add(tokens), digest.add(tops), digest.add(sums);
    for (float temperature : {0.7f, 1.0f, 3.0f}) {
        check(samewise_scores(logits.data(), vocab, temperature, 12.0f, 0x238275BCu, 0x38FCBE91u, scores.data(),
                        threads));
        digest.add(scores);
    }
    for (int64_t i = 0; i < vocab; i++) gaps[i] = (tops[0] - logits[i]) / 0.5f;
    samewise_masses(gaps.data(), vocab, 48, masses.data());
    digest.add(masses);
}

// Many ids, which are shared out among threads.
void wide_rows(Digest& digest, int64_t threads) {
    const int64_t rows = 3, vocab = 20'011;
    auto logits = numbers(rows * vocab, 31, 0);
    std::vector<int64_t> tokens(rows);
    std::vector<float> tops(rows), sums(rows), scores(vocab);
    check(samewise_row_stats(logits.data(), rows, vocab, vocab, tokens.data(), tops.data(), sums.data(), threads));
    check(samewise_scores(logits.data(), vocab, 0.9f, __builtin_inff(), 0x12345678u, 0x9ABCDEF0u, scores.data(),
                    threads));
    digest.add(tokens), digest.add(tops), digest.add(sums), digest.add(scores);
}

// Logits of few values, so that many log-probabilities are the same; rows in another order than they have.
void ranks(Digest& digest, int64_t threads) {
    const int64_t rows = 3, vocab = 9001;
    auto logits = numbers(rows * vocab, 33, 1);
    for (int64_t k = 0; k < vocab; k++) logits[vocab + k] = float(k * 7 % 11), logits[2 * vocab + k] = 12.0f - float(k % 3) * 1e-6f;
    std::vector<int64_t> tokens(rows), at{2, 0, 1, 2, 0}, of{17, 4096, 9000, 0, 8191}, places(at.size());
    std::vector<float> tops(rows), sums(rows), row_tops, row_sums, values(20 * at.size());
    std::vector<int32_t> ids(20 * at.size());
    check(samewise_row_stats(logits.data(), rows, vocab, vocab, tokens.data(), tops.data(), sums.data(), threads));
    for (int64_t row : at) row_tops.push_back(tops[row]), row_sums.push_back(sums[row]);
    check(samewise_top_values(logits.data(), at.data(), 5, vocab, vocab, row_tops.data(), row_sums.data(), 20, ids.data(),
                              values.data(), threads));
    check(samewise_ranks(logits.data(), at.data(), 5, vocab, vocab, row_tops.data(), row_sums.data(), of.data(),
                         places.data(), threads));
    digest.add(ids), digest.add(values), digest.add(places);
}

// Rows without a sum: the sign and payload of a NaN differ between CPUs, and must reach no result.
void not_finite(Digest& digest, int64_t threads) {
    const float inf = __builtin_inff(), nan = __builtin_nanf("");
    const int64_t rows = 5, vocab = 37;
    auto logits = numbers(rows * vocab, 32);
    for (int64_t row = 1; row < rows; row++)
        std::fill_n(logits.begin() + row * vocab, vocab, row == 1 ? inf : row == 2 ? -inf : row == 3 ? nan : -nan);
    logits[5] = nan;
    std::vector<int64_t> tokens(rows), masses(4);
    std::vector<float> tops(rows), sums(rows), gaps{nan, -nan, inf, 0.0f};
    check(samewise_row_stats(logits.data(), rows, vocab, vocab, tokens.data(), tops.data(), sums.data(), threads));
    samewise_masses(gaps.data(), 4, 48, masses.data());
    digest.add(tokens), digest.add(tops), digest.add(sums), digest.add(masses);
}

struct Case { const char* name; void (*run)(Digest&, int64_t); };

const Case CASES[] = {
    {"linear float32", [](Digest& d, int64_t t) { linears(d, t, F32, 96), linears(d, t, F32, 77); }},
    {"linear bfloat16", [](Digest& d, int64_t t) { linears(d, t, BF16, 96), linears(d, t, BF16, 77); }},
    {"linear float16", [](Digest& d, int64_t t) { linears(d, t, F16, 96), linears(d, t, F16, 77); }},
    {"linear int4", [](Digest& d, int64_t t) { linears(d, t, Q4, 96); }},
    {"linear int8", [](Digest& d, int64_t t) { linears(d, t, Q8, 96); }},
    {"attention float32", [](Digest& d, int64_t t) { attention(d, t, F32, 0, PLAIN_ROWS), attention(d, t, F32, 24, PLAIN_ROWS); }},
    {"attention bfloat16", [](Digest& d, int64_t t) { attention(d, t, BF16, 0, PLAIN_ROWS); }},
    {"attention float16", [](Digest& d, int64_t t) { attention(d, t, F16, 0, PLAIN_ROWS); }},
    {"layer", [](Digest& d, int64_t t) { layers(d, t, {LayerKind::PLAIN, LayerKind::HEAD_NORMS}); }},
    {"other layers", [](Digest& d, int64_t t) { layers(d, t, {LayerKind::SANDWICH, LayerKind::AFTER}); }},
    {"rotary", rotary},
    {"sampling", sampling},
    {"ranks", ranks},
    {"long linears", [](Digest& d, int64_t t) { for (int64_t form : {F32, BF16, F16, Q4, Q8}) linears(d, t, form, 1600); }},
    {"few rows", few_rows},
    {"wide rows", wide_rows},
    {"not finite", not_finite},
    {"many rows", many_rows},
    {"trees", trees},
    {"layer bfloat16", [](Digest& d, int64_t t) { layers(d, t, {LayerKind::HEAD_NORMS, LayerKind::SANDWICH}, BF16); }},
    {"layer float16", [](Digest& d, int64_t t) { layers(d, t, {LayerKind::HEAD_NORMS, LayerKind::SANDWICH}, F16); }},
    {"move", move},
};

}  // namespace

extern "C" int64_t samewise_selftest_count() { return int64_t(sizeof CASES / sizeof *CASES); }
extern "C" const char* samewise_selftest_name(int64_t i) { return CASES[i].name; }
extern "C" int samewise_selftest(int64_t i, int64_t threads, uint64_t* value) {
    return guarded([&] {
        DefaultArithmetic arithmetic;
        Digest digest;
        CASES[i].run(digest, threads);
        *value = digest.value;
        return DONE;
    });
}

#ifdef SAMEWISE_SELFTEST_MAIN  // a program by itself, for machines and emulators without Python
#include <cstdio>
#include <cstdlib>
int main(int, char** given) {
    const int64_t threads = given[1] != nullptr ? std::atoi(given[1]) : 1;
    for (int64_t i = 0; i < samewise_selftest_count(); i++) {
        uint64_t digest;
        if (samewise_selftest(i, threads, &digest) != DONE) return 1;
        std::printf("%-20s %016llx\n", samewise_selftest_name(i), (unsigned long long)digest);
    }
}
#endif
