// One pass in its staging buffer: pack.py in C++, number for number.
//
// The Python module is the reference and says what each field means. Elements that it leaves as they were are
// left here too. Every index is checked before it is used: numbers that do not fit together are refused, and
// what was written of such a pass is junk.

#include <algorithm>
#include <cstdint>
#include <cstring>

extern "C" {

// Of kernels/attention/tiles.cpp.
int64_t samewise_write_tiles(const void *plan, int64_t num_rows, const int32_t *lengths,
                             const int32_t *page_start, const int32_t *tail_start, const int32_t *tail,
                             int32_t *work_list);

// Mirrored by ctypes in packer.py: where the parts of a staging buffer begin, as indices of int32.
struct BufferLayout {
    int64_t num_rows;
    int64_t page;  // slots of a KV page
    int64_t trash;  // where padding rows write
    int64_t work_start;
    int64_t moves_start;  // a count, then pairs of slots
    int64_t keep_start;
    int64_t pages_start;
    int64_t size;
    const void *plan;  // TileConstants, or null: there is no work list
};
}

namespace {

constexpr int32_t kRoot = -1;
constexpr int kSpanLen = 6;

enum Status : int64_t { kNoMemory = -1, kTooManyRows = -2, kInconsistent = -3 };

struct SpanNumbers {
    int32_t rows, given, start, source, pages, parents;
};
static_assert(sizeof(SpanNumbers) == kSpanLen * sizeof(int32_t), "six numbers per span");

// The parts of a staging buffer.
struct Buffer {
    int32_t *tokens, *source, *positions, *lengths, *slots, *page_start, *tail_start, *tail;
    int32_t *work, *moves, *keep, *pages, *end;

    Buffer(const BufferLayout &layout, int32_t *host) {
        int32_t **fields[] = {&tokens, &source,     &positions,  &lengths,
                              &slots,  &page_start, &tail_start, &tail};
        for (int32_t **field : fields) {
            *field = host;
            host += layout.num_rows;
        }
        host = tokens;
        work = host + layout.work_start;
        moves = host + layout.moves_start;
        keep = host + layout.keep_start;
        pages = host + layout.pages_start;
        end = host + layout.size;
    }
};

// Write the tails of a tree whose guesses are in the rows from `row` on. Positions, lengths and tails change;
// slots are written already. Returns the end of the lists of slots, or null if a number does not fit.
int32_t *write_tails(const Buffer &buffer, int64_t row, int32_t root, const int32_t *parents, int32_t num,
                     int32_t *list) {
    const int32_t *slots = buffer.slots + row;
    int32_t *positions = buffer.positions + row;
    int32_t *begin = list;
    for (int32_t node = 0; node < num; node++) {
        int32_t parent = parents[node];
        if (parent < kRoot || parent >= node) return nullptr;
        positions[node] = (parent == kRoot ? root : positions[parent]) + 1;
        int32_t depth = positions[node] - root;
        bool begins = node == 0 || parent != node - 1;
        if (buffer.end - list < (begins ? depth : 1)) return nullptr;
        if (begins) {
            begin = list;
            list += depth - 1;
            for (int32_t *at = list; parent != kRoot; parent = parents[parent]) *--at = slots[parent];
        }
        *list++ = slots[node];
        buffer.lengths[row + node] = positions[node] + 1;
        buffer.tail_start[row + node] = root + 1;
        buffer.tail[row + node] = static_cast<int32_t>(begin - buffer.pages);
    }
    return list;
}

bool write_span(const BufferLayout &layout, const Buffer &buffer, const SpanNumbers &span, int64_t row,
                const int32_t *inputs, int64_t table) {
    const int32_t *pages = buffer.pages + table;
    int32_t page = static_cast<int32_t>(layout.page);
    int64_t last = static_cast<int64_t>(span.start) + span.rows - 1;
    if (span.start < 0 || (span.rows && last / page >= span.pages)) return false;
    std::memcpy(buffer.tokens + row, inputs, sizeof(int32_t) * static_cast<size_t>(span.rows));
    int32_t source = span.rows == 1 ? span.source : -1;
    for (int32_t i = 0; i < span.rows; i++) {
        int32_t position = span.start + i;
        buffer.source[row + i] = source;
        buffer.positions[row + i] = position;
        buffer.lengths[row + i] = buffer.tail_start[row + i] = position + 1;
        buffer.slots[row + i] = pages[position / page] * page + position % page;
        buffer.page_start[row + i] = static_cast<int32_t>(table);
        buffer.tail[row + i] = 0;
    }
    return true;
}

void pad(const BufferLayout &layout, const Buffer &buffer, int64_t used) {
    int64_t num = layout.num_rows;
    auto fill = [=](int32_t *field, int32_t value) { std::fill(field + used, field + num, value); };
    fill(buffer.source, -1);
    fill(buffer.slots, static_cast<int32_t>(layout.trash));
    for (int32_t *field : {buffer.tokens, buffer.positions, buffer.lengths, buffer.page_start,
                           buffer.tail_start, buffer.tail}) {
        fill(field, 0);
    }
}

}  // namespace

// Fill the staging buffer `host`. `numbers`: six per span (see SpanNumbers), then all inputs, all parents, the
// rows to keep and the pairs of slots to move. `num_keep` is -1 where no rows are chosen. `tables`: all page
// tables. Returns the number of elements to send, or a Status.
extern "C" int64_t samewise_pack(const BufferLayout *layout, int32_t *host, int64_t num_spans,
                                 const int32_t *numbers, int64_t num_numbers, const void *tables,
                                 int64_t num_pages, int64_t num_keep, int64_t num_moves) {
    Buffer buffer(*layout, host);
    const auto *spans = reinterpret_cast<const SpanNumbers *>(numbers);
    int64_t used = 0, num_parents = 0, num_tables = 0;
    if (num_spans * kSpanLen > num_numbers) return kInconsistent;
    for (int64_t i = 0; i < num_spans; i++) {
        const SpanNumbers &span = spans[i];
        if (span.rows < 0 || span.parents < 0 || span.pages < 0) return kInconsistent;
        if (span.parents && (span.given < 0 || span.rows - span.given != span.parents)) return kInconsistent;
        used += span.rows;
        num_parents += span.parents;
        num_tables += span.pages;
    }
    if (used > layout->num_rows) return kTooManyRows;
    int64_t num_kept = layout->pages_start - layout->keep_start;
    int64_t max_moves = (layout->keep_start - layout->moves_start) / 2;
    if (num_keep >= 0 && num_keep != num_kept) return kInconsistent;
    if (num_tables != num_pages || num_pages > buffer.end - buffer.pages || num_moves > max_moves) {
        return kInconsistent;
    }
    int64_t num_chosen = std::max<int64_t>(num_keep, 0);
    if (num_spans * kSpanLen + used + num_parents + num_chosen + 2 * num_moves != num_numbers) {
        return kInconsistent;
    }
    if (num_pages) std::memcpy(buffer.pages, tables, sizeof(int32_t) * static_cast<size_t>(num_pages));
    const int32_t *inputs = numbers + num_spans * kSpanLen, *parents = inputs + used;
    const int32_t *keep = parents + num_parents, *moves = keep + num_chosen;
    int32_t *list = buffer.pages + num_pages;
    int64_t row = 0, table = 0;
    for (int64_t i = 0; i < num_spans; i++) {
        const SpanNumbers &span = spans[i];
        if (!write_span(*layout, buffer, span, row, inputs + row, table)) return kInconsistent;
        if (span.parents && span.rows > 1) {
            int32_t root = span.start + span.given - 1;
            list = write_tails(buffer, row + span.given, root, parents, span.parents, list);
            if (!list) return kInconsistent;
        }
        row += span.rows;
        table += span.pages;
        parents += span.parents;
    }
    pad(*layout, buffer, used);
    if (max_moves) {
        *buffer.moves = static_cast<int32_t>(num_moves);
        std::copy(moves, moves + 2 * num_moves, buffer.moves + 1);
    }
    std::copy(keep, keep + num_chosen, buffer.keep);
    if (layout->plan && samewise_write_tiles(layout->plan, layout->num_rows, buffer.lengths,
                                             buffer.page_start, buffer.tail_start, buffer.tail, buffer.work)) {
        return kNoMemory;
    }
    return list - host;
}
