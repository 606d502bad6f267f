// Canonical attention for the CPU, over paged K and V.
//
// What the bits are. Every float operation below is an IEEE 754 binary32 operation (add, subtract,
// multiply, divide, fused multiply-add; round to nearest even, subnormals kept), and the order of those
// that make up one output element is fixed by the row's length and window alone:
//
//   score(key)  = (fma chain over d = 0 .. D-1, from +0) * scale
//   top         = max over the row's keys (exact, so its order does not matter)
//   weight(key) = exp(score - top), by the polynomial of `exp_below`; 0 below exp(-87)
//   sum         = 16 lane sums, lane = key % 16, in key order from +0; then folded 16 -> 8 -> 4 -> 2 -> 1
//   acc(d)      = fma chain over keys in order, from +0
//   out(d)      = acc(d) / sum, rounded once to the output type
//
// Vectors run across keys or across d, never along a chain, so vector width, compiler, number of
// threads and the way queries are tiled cannot change a result. Nothing here may be compiled with
// contraction or fast-math. Keys outside a row's range take part in no operation that reaches its output:
// they may be NaN.
//
// A row may have a tail: keys from `tail_start` on that lie in listed slots, not where its pages have them. They
// take the lanes of their positions, so a row's bits are those of a sequence in which its keys stand in place.
//
// Layout: K pages [P, Hkv, D, 16] (16 keys are the lanes of a vector), V pages [P, Hkv, 16, D].

#include "attention.h"
#include "lanes.h"
#include "team.h"

namespace {

using samewise::AttentionPlan;
using samewise::Tile;

constexpr int PAGE = 16;
constexpr int MAX_QUERIES = 48;                // queries of one tile: they share each K and V load
constexpr int MIN_QUERIES = 3;                 // of one tile: fewer would load K and V for too little
constexpr int64_t MAX_SCORES = int64_t{2} << 20;  // floats of scores one thread may hold
constexpr int64_t CALL_ALONE = 200'000;        // multiply-adds not worth waking another thread for
constexpr int64_t STORES_ALONE = 25'000;       // elements of K; a scattered store costs several multiply-adds

constexpr int BAD_SLOT = 2, BAD_PAGE = 3, BAD_DTYPE = 4;

struct Range { int64_t first, end; };

inline Range keys_of(const Call& c, int64_t row) {
    int64_t end = c.lengths[row];
    return {c.window > 0 ? std::max<int64_t>(0, end - c.window) : 0, end};
}

// The keys from `start` on are in the slots that `pages` lists from `list` on, in the order of keys.
struct Tail {
    int64_t start, list;
    bool operator==(const Tail& other) const { return start == other.start && list == other.list; }
};
constexpr Tail NO_TAIL{INT64_MAX, 0};

inline Tail tail_of(const Call& c, int64_t row) {
    if (c.tail_start == nullptr || c.tail_start[row] >= c.lengths[row]) return NO_TAIL;
    return {c.tail_start[row], c.tail[row]};
}

// ---------------------------------------------------------------- inner loops

// out[p][n][key] = (q[n] . k[p][key]) * scale for the 16 keys of each of P pages. A chain waits for itself, so few
// queries take several pages at once.
template <int N, int P>
void score(const float* q, const float* const* k, int64_t dim, float scale, float* out) {
    Lanes sum[P * N];
#pragma GCC unroll 16
    for (int i = 0; i < P * N; i++) sum[i] = splat(0.0f);
    for (int64_t d = 0; d < dim; d++) {
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) {
            Lanes keys = load(k[p] + d * PAGE);
#pragma GCC unroll 16
            for (int n = 0; n < N; n++) sum[p * N + n] = fma(splat(q[n * dim + d]), keys, sum[p * N + n]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < P * N; i++) store(out + i * PAGE, mul(sum[i], splat(scale)));
}

// acc[n] += weight[n][key] * v[key] for the keys [from, to) of a page, in order.
template <int N>
void gather(const float* weight, const float* v, int64_t dim, int64_t from, int64_t to, float* acc) {
    int64_t d = 0;
    for (; d + 16 <= dim; d += 16) {
        Lanes sum[N];
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) sum[n] = load(acc + n * dim + d);
        for (int64_t j = from; j < to; j++) {
            Lanes value = load(v + j * dim + d);
#pragma GCC unroll 16
            for (int n = 0; n < N; n++) sum[n] = fma(splat(weight[n * PAGE + j]), value, sum[n]);
        }
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) store(acc + n * dim + d, sum[n]);
    }
    for (; d < dim; d++)
        for (int n = 0; n < N; n++)
            for (int64_t j = from; j < to; j++)
                acc[n * dim + d] = __builtin_fmaf(weight[n * PAGE + j], v[j * dim + d], acc[n * dim + d]);
}

// s[j] becomes exp(s[j] - top), or 0 outside [from, to); sum[j] += s[j].
inline void weigh(float* s, float top, int from, int to, float* sum) {
    for (int j = 0; j < PAGE; j++) {
        float p = exp_below(s[j] - top);
        p = (j >= from) & (j < to) ? p : 0.0f;
        s[j] = p;
        sum[j] = sum[j] + p;
    }
}

// top[j] = max(top[j], s[j]) for j in [from, to). A NaN is passed over here; `weigh` brings it out.
inline void raise(const float* s, int from, int to, float* top) {
    for (int j = 0; j < PAGE; j++) {
        bool higher = (j >= from) & (j < to) & (s[j] > top[j]);
        top[j] = higher ? s[j] : top[j];
    }
}

inline float fold_max(const float* x) {
    float m = x[0];
    for (int j = 1; j < PAGE; j++) m = x[j] > m ? x[j] : m;
    return m;
}

inline float fold_sum(const float* x) {
    float s[PAGE];
    std::memcpy(s, x, sizeof s);
    for (int width = PAGE / 2; width > 0; width /= 2)
        for (int j = 0; j < width; j++) s[j] = s[j] + s[j + width];
    return s[0];
}

// f(std::integral_constant<int, n>) for a run-time n in [1, BLOCK]: register blocks need it at compile time.
template <class F, int... N>
void with_count(int n, F f, std::integer_sequence<int, N...>) {
    (void)((n == N + 1 && (f(std::integral_constant<int, N + 1>{}), true)) || ...);
}

// f(first, count) over [0, n) in even pieces of at most BLOCK.
template <class F>
void in_blocks(int n, F f) {
    int pieces = (n + BLOCK - 1) / BLOCK, size = (n + pieces - 1) / pieces;
    for (int first = 0; first < n; first += size)
        with_count(std::min(size, n - first), [&](auto count) { f(first, count); },
                   std::make_integer_sequence<int, BLOCK>{});
}

// ---------------------------------------------------------------- one tile

// T: the type of pages. Io: that of Q, K, V and the result, T or float32, whose values T can hold.
template <class T, class Io>
class Attention {
  public:
    using Stored = typename T::Stored;
    using Given = typename Io::Stored;
    Attention(const Call& call, int64_t out_row) : c(call), group(call.heads / call.kv_heads), out_row(out_row) {}

    // Every row's K and V to its slot. One worker owns a head, so rows that share the trash page do not race.
    void write(int64_t head) const {
        auto *k = static_cast<const Given*>(c.k) + head * c.k_head;
        auto *v = static_cast<const Given*>(c.v) + head * c.v_head;
        for (int64_t row = 0; row < c.rows; row++) {
            int64_t page = c.slots[row] / PAGE, at = c.slots[row] % PAGE;
            Stored* keys = k_page(page, head) + at;
            for (int64_t d = 0; d < c.dim; d++) keys[d * PAGE] = converted<Io, T>(k[row * c.k_row + d]);
            Stored* values = v_page(page, head) + at * c.dim;
            for (int64_t d = 0; d < c.dim; d++) values[d] = converted<Io, T>(v[row * c.v_row + d]);
        }
    }

    void attend(const Tile& t, int64_t head, float* scratch) const {
        const int n = int(t.end - t.begin);
        float *q = scratch, *acc = q + n * c.dim, *room = acc + n * c.dim, *scores = room + PAGE * c.dim;
        float top[MAX_QUERIES * PAGE], sum[MAX_QUERIES * PAGE];
        Query queries[MAX_QUERIES];
        for (int i = 0; i < n; i++) {
            int64_t row = row_of(t, i);
            queries[i] = {keys_of(c, row), tail_of(c, row)};
            auto* x = static_cast<const Given*>(c.q) + row * c.q_row + query_head(t, head, i) * c.q_head;
            for (int64_t d = 0; d < c.dim; d++) q[i * c.dim + d] = Io::widen(x[d]);
        }
        std::fill_n(top, n * PAGE, -__builtin_inff());
        std::fill_n(sum, n * PAGE, 0.0f);
        std::fill_n(acc, n * c.dim, 0.0f);

        for (int64_t page = score_together(t, n, head, q, scores); page < t.end_page; page++) {
            float* s = scores + (page - t.first_page) * n * PAGE;
            each_source(t, queries, page, [&](int first, int end, const Source& source) {
                const float* k = keys_from(source, head, room);
                in_blocks(end - first, [&](int at, auto count) {
                    const int i = first + at;
                    score<count, 1>(q + i * c.dim, &k, c.dim, c.scale, s + i * PAGE);
                });
            });
        }
        for (int64_t page = t.first_page; page < t.end_page; page++) {
            const float* s = scores + (page - t.first_page) * n * PAGE;
            for (int i = 0; i < n; i++) {
                auto [from, to] = lanes_of(queries[i].keys, page);
                raise(s + i * PAGE, from, to, top + i * PAGE);
            }
        }
        for (int i = 0; i < n; i++) top[i] = fold_max(top + i * PAGE);  // i <= i * PAGE: not yet read

        for (int64_t page = t.first_page; page < t.end_page; page++) {
            float* s = scores + (page - t.first_page) * n * PAGE;
            each_source(t, queries, page, [&](int first, int end, const Source& source) {
                const float* v = values_from(source, head, room);
                bool whole = true;
                for (int i = first; i < end; i++) {
                    auto [from, to] = lanes_of(queries[i].keys, page);
                    whole = whole && from == 0 && to == PAGE;
                    if (from < to) weigh(s + i * PAGE, top[i], from, to, sum + i * PAGE);
                }
                if (whole) {
                    in_blocks(end - first, [&](int at, auto count) {
                        const int i = first + at;
                        gather<count>(s + i * PAGE, v, c.dim, 0, PAGE, acc + i * c.dim);
                    });
                    return;
                }
                for (int i = first; i < end; i++) {
                    auto [from, to] = lanes_of(queries[i].keys, page);
                    gather<1>(s + i * PAGE, v, c.dim, from, to, acc + i * c.dim);
                }
            });
        }
        for (int i = 0; i < n; i++) {
            float total = fold_sum(sum + i * PAGE);
            auto* out = static_cast<Given*>(c.out) + row_of(t, i) * out_row + query_head(t, head, i) * c.dim;
            for (int64_t d = 0; d < c.dim; d++) out[d] = converted<T, Io>(T::narrow(acc[i * c.dim + d] / total));
        }
    }

  private:
    const Call& c;
    const int64_t group, out_row;

    struct Query { Range keys; Tail tail; };

    // Where the keys of one page of positions are: in `page`, or, where `moved`, lanes [from, to) in `slots`.
    struct Source {
        int64_t page;
        bool moved;
        int from, to;
        int64_t slots[PAGE];
    };

    Stored* k_page(int64_t page, int64_t head) const {
        return static_cast<Stored*>(c.k_pages) + (page * c.kv_heads + head) * PAGE * c.dim;
    }
    Stored* v_page(int64_t page, int64_t head) const {
        return static_cast<Stored*>(c.v_pages) + (page * c.kv_heads + head) * PAGE * c.dim;
    }
    int64_t row_of(const Tile& t, int i) const { return t.row + (t.begin + i) / group; }
    int64_t query_head(const Tile& t, int64_t head, int i) const { return head * group + (t.begin + i) % group; }

    // Scores of few queries for pages that every query finds in place, several at a time. Returns the first page
    // that is left.
    int64_t score_together(const Tile& t, int n, int64_t head, const float* q, float* scores) const {
        int64_t page = t.first_page;
        if constexpr (std::is_same_v<T, Float32>) {
            const int32_t* pages = c.pages + c.page_start[t.row];
            const int64_t end = std::min(t.end_page, t.shared);
            with_count(n, [&](auto count) {
                constexpr int N = count, P = std::min(4, BLOCK / N);
                if constexpr (P > 1) {
                    for (; page + P <= end; page += P) {
                        const float* k[P];
                        for (int p = 0; p < P; p++) k[p] = k_page(pages[page + p], head);
                        score<N, P>(q, k, c.dim, c.scale, scores + (page - t.first_page) * N * PAGE);
                    }
                }
            }, std::make_integer_sequence<int, BLOCK>{});
        }
        return page;
    }

    // The lanes of `page` that hold keys of the range; empty where from >= to.
    static std::pair<int, int> lanes_of(Range r, int64_t page) {
        auto lane = [&](int64_t key) { return int(std::clamp<int64_t>(key - page * PAGE, 0, PAGE)); };
        return {lane(r.first), lane(r.end)};
    }

    bool sees(const Query& query, int64_t page) const {
        auto [from, to] = lanes_of(query.keys, page);
        return from < to;
    }

    // f(first, end, source) over the queries, for those that find the page's keys in one place together. A page
    // with tails leaves out queries that see none of it: their sequence need not list it.
    template <class F>
    void each_source(const Tile& t, const Query* queries, int64_t page, F f) const {
        const int n = int(t.end - t.begin);
        const int32_t* pages = c.pages + c.page_start[t.row];
        Source source;
        for (int first = 0, end; first < n; first = end) {
            if (page < t.shared) {
                end = n;
                source.page = pages[page], source.moved = false;
            } else {
                end = first + 1;
                if (!sees(queries[first], page)) continue;
                const Tail tail = tail_in(queries[first], page);
                while (end < n && sees(queries[end], page) && tail_in(queries[end], page) == tail) end++;
                find(pages, tail, queries + first, end - first, page, source);
            }
            f(first, end, source);
        }
    }

    // The query's tail if it has keys in the page.
    static Tail tail_in(const Query& query, int64_t page) {
        return query.tail.start < (page + 1) * PAGE ? query.tail : NO_TAIL;
    }

    // Where `count` queries with one tail find the keys of a page.
    void find(const int32_t* pages, Tail tail, const Query* queries, int count, int64_t page, Source& source) const {
        source.moved = false;
        if (tail == NO_TAIL) {
            source.page = pages[page];
            return;
        }
        source.from = PAGE, source.to = 0;
        for (int i = 0; i < count; i++) {
            auto [from, to] = lanes_of(queries[i].keys, page);
            source.from = std::min(source.from, from), source.to = std::max(source.to, to);
        }
        for (int j = source.from; j < source.to; j++) {
            int64_t key = page * PAGE + j;
            bool in_place = key < tail.start;
            source.slots[j] = in_place ? int64_t{pages[page]} * PAGE + j : c.pages[tail.list + key - tail.start];
        }
        source.page = source.slots[source.from] / PAGE;
        for (int j = source.from; j < source.to; j++)
            source.moved = source.moved || source.slots[j] != source.page * PAGE + j;
    }

    const float* keys_from(const Source& source, int64_t head, float* room) const {
        const float* keys = widened<T>(k_page(source.page, head), PAGE * c.dim, room);
        if (!source.moved) return keys;
        if (keys != room) std::memcpy(room, keys, sizeof(float) * PAGE * c.dim);
        for (int j = source.from; j < source.to; j++) {
            if (source.slots[j] == source.page * PAGE + j) continue;
            const Stored* x = k_page(source.slots[j] / PAGE, head) + source.slots[j] % PAGE;
            for (int64_t d = 0; d < c.dim; d++) room[d * PAGE + j] = T::widen(x[d * PAGE]);
        }
        return room;
    }

    const float* values_from(const Source& source, int64_t head, float* room) const {
        if (!source.moved) return widened<T>(v_page(source.page, head), PAGE * c.dim, room);
        for (int j = source.from; j < source.to; j++) {
            const Stored* x = v_page(source.slots[j] / PAGE, head) + source.slots[j] % PAGE * c.dim;
            for (int64_t d = 0; d < c.dim; d++) room[j * c.dim + d] = T::widen(x[d]);
        }
        return room;
    }
};

// ---------------------------------------------------------------- cutting the work

// Floats that `attend` needs for a tile.
int64_t scratch_len(const Call& c, const Tile& t) {
    const int64_t n = t.end - t.begin;
    return c.dim * (2 * n + PAGE) + (t.end_page - t.first_page) * n * PAGE;
}

// Rows that stand together, share their pages and see something.
std::vector<Range> runs_of(const Call& c) {
    std::vector<Range> runs;
    for (int64_t row = 0; row < c.rows; row++) {
        if (c.lengths[row] <= 0) continue;
        bool joins = !runs.empty() && runs.back().end == row && c.page_start[row - 1] == c.page_start[row];
        if (joins)
            runs.back().end = row + 1;
        else
            runs.push_back({row, row + 1});
    }
    return runs;
}

Range pages_of(const Call& c, int64_t row, int64_t end_row) {
    Range all{INT64_MAX, 0};
    for (; row < end_row; row++) {
        Range keys = keys_of(c, row);
        all.first = std::min(all.first, keys.first / PAGE);
        all.end = std::max(all.end, (keys.end + PAGE - 1) / PAGE);
    }
    return all;
}

// The first key that a row finds through a tail.
int64_t first_tail(const Call& c, Range rows) {
    int64_t first = NO_TAIL.start;
    for (int64_t row = rows.first; row < rows.end; row++) first = std::min(first, tail_of(c, row).start);
    return first;
}

void cut(const Call& c, Range run, int64_t size, std::vector<Tile>& tiles) {
    int64_t group = c.heads / c.kv_heads, queries = (run.end - run.first) * group;
    Range pages = pages_of(c, run.first, run.end);
    size = std::max<int64_t>(1, std::min(size, MAX_SCORES / ((pages.end - pages.first) * PAGE)));
    const int64_t pieces = (queries + size - 1) / size;
    size = (queries + pieces - 1) / pieces;  // tiles of one run are of one size
    for (int64_t x = 0; x < queries; x += size) {
        int64_t end = std::min(x + size, queries);
        Range rows{run.first + x / group, run.first + (end + group - 1) / group};
        pages = pages_of(c, rows.first, rows.end);
        tiles.push_back({run.first, x, end, pages.first, pages.end, first_tail(c, rows) / PAGE});
    }
}

// Tiles as large as still leave every thread a few tasks, or equally many where there are few queries.
std::vector<Tile> tiles_of(const Call& c, const std::vector<Range>& runs) {
    std::vector<Tile> tiles;
    for (int64_t size = MAX_QUERIES;; size /= 2) {
        tiles.clear();
        for (Range run : runs) cut(c, run, size, tiles);
        const int64_t tasks = int64_t(tiles.size()) * c.kv_heads;
        const int64_t least = tasks % c.threads == 0 ? BLOCK : MIN_QUERIES;
        if (tasks >= 4 * c.threads || size / 2 < least) return tiles;
    }
}

int check_tail(const Call& c, int64_t row) {
    Tail tail = tail_of(c, row);
    if (tail == NO_TAIL) return DONE;
    int64_t end = tail.list + c.lengths[row] - tail.start;
    if (tail.start < 0 || tail.list < 0 || end > c.listed_pages) return BAD_PAGE;
    for (int64_t i = tail.list; i < end; i++)
        if (c.pages[i] < 0 || c.pages[i] >= c.num_pages * PAGE) return BAD_PAGE;
    return DONE;
}

int check(const Call& c, const std::vector<Range>& runs) {
    for (int64_t row = 0; row < c.rows; row++)
        if (c.slots[row] < 0 || c.slots[row] >= c.num_pages * PAGE) return BAD_SLOT;
    for (Range run : runs) {
        int64_t start = c.page_start[run.first], first = pages_of(c, run.first, run.end).first, end = 0;
        for (int64_t row = run.first; row < run.end; row++) {
            int64_t in_pages = std::min<int64_t>(c.lengths[row], tail_of(c, row).start);
            end = std::max(end, (in_pages + PAGE - 1) / PAGE);
            if (int bad = check_tail(c, row)) return bad;
        }
        if (start < 0 || start + end > c.listed_pages) return BAD_PAGE;
        for (int64_t i = start + first; i < start + end; i++)
            if (c.pages[i] < 0 || c.pages[i] >= c.num_pages) return BAD_PAGE;
    }
    return DONE;
}

int run(const Call& c) {
    AttentionPlan plan;
    if (int bad = samewise::plan_attention(c, plan)) return bad;
    float* room = scratch(plan.room_len * c.threads);
    const bool few_stores = c.rows * c.kv_heads * c.dim < STORES_ALONE;
    const bool few = plan.work < CALL_ALONE;
    in_region(few && few_stores ? 1 : c.threads, 3, [&](Team team) {
        team.run(1, true, [&](int64_t) { samewise::clear_empty_rows(c, plan); });
        team.run(c.kv_heads, few_stores, [&](int64_t head) { samewise::write_head(c, plan, head); });
        team.run(plan.num_tasks(c), few, [&](int64_t task) {
            samewise::attend_task(c, plan, task, room + team.worker * plan.room_len);
        });
    });
    return DONE;
}

// f(type of pages, type of Q, K, V and the result)
template <class F>
void with_types(const Call& c, const AttentionPlan& plan, F f) {
    auto both = [&](auto type) { plan.floats ? f(type, Float32{}) : f(type, type); };
    switch (c.dtype) {
        case 0: f(Float32{}, Float32{}); break;
        case 1: both(BFloat16{}); break;
        default: both(Float16{}); break;
    }
}

}  // namespace

int samewise::plan_attention(const Call& c, AttentionPlan& plan) {
    if (c.dtype < 0 || c.dtype > 2) return BAD_DTYPE;
    const std::vector<Range> runs = runs_of(c);
    if (int bad = check(c, runs)) return bad;
    plan.tiles = tiles_of(c, runs);
    plan.out_row = c.heads * c.dim, plan.room_len = plan.work = 0, plan.floats = false;
    for (const Tile& t : plan.tiles) {
        plan.room_len = std::max(plan.room_len, scratch_len(c, t));
        plan.work += (t.end - t.begin) * (t.end_page - t.first_page) * 2 * PAGE * c.dim * c.kv_heads;
    }
    plan.room_len = (plan.room_len + 31) / 32 * 32;  // two workers share no cache line
    return DONE;
}

void samewise::write_head(const Call& c, const AttentionPlan& plan, int64_t head) {
    with_types(c, plan, [&](auto type, auto given) { Attention<decltype(type), decltype(given)>(c, 0).write(head); });
}

void samewise::attend_task(const Call& c, const AttentionPlan& plan, int64_t task, float* room) {
    with_types(c, plan, [&](auto type, auto given) {
        const Attention<decltype(type), decltype(given)> attention(c, plan.out_row);
        attention.attend(plan.tiles[task / c.kv_heads], task % c.kv_heads, room);
    });
}

void samewise::clear_empty_rows(const Call& c, const AttentionPlan& plan) {
    const int64_t item = c.dtype == 0 || plan.floats ? 4 : 2;
    for (int64_t row = 0; row < c.rows; row++)
        if (c.lengths[row] <= 0)
            std::memset(static_cast<char*>(c.out) + row * plan.out_row * item, 0, item * c.heads * c.dim);
}

// Write every row's K and V, then attend. Nothing was written unless DONE is returned.
extern "C" int samewise_attend(const Call* call) {
    return guarded([&] { return run(*call); });
}
