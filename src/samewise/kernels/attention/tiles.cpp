// The work list of a pass: TilePlan.write of tiles.py in C++, number for number.
//
// The Python module is the reference and says what tiles, chains, splits and pieces are. Elements that it
// leaves as they were are left here too.

#include <algorithm>
#include <cstdint>
#include <new>
#include <vector>

extern "C" {

// Mirrored by ctypes in native_tiles.py: the constants of a TilePlan for passes of one number of rows.
struct TileConstants {
    int64_t tile_rows;
    int64_t wide_rows;  // 0: there is one list
    int64_t split;
    int64_t window;  // -1: none
    int64_t kv_heads;
    int64_t num_slots;
    int64_t programs;  // that the device runs at the same time
    double cut_threshold;
};
}

namespace {

constexpr int64_t kHeaderLen = 3;
constexpr int64_t kColumns = 17;

struct Tile {
    int32_t row, count;
    int32_t shortest, longest, shared;
    int64_t first_split, splits;
};

struct PassRows {
    int64_t num;
    const int32_t *lengths, *page_start, *tail_start, *tail;
    bool has_tails;

    bool same_pages(int64_t i) const { return page_start[i + 1] == page_start[i]; }

    // Whether the next row is one key longer and finds all keys of row i in the same slots.
    bool continues(int64_t i) const {
        int32_t previous = lengths[i];
        if (lengths[i + 1] - previous != 1 || previous <= 0 || !same_pages(i)) return false;
        if (!has_tails) return true;
        if (tail_start[i] < previous) return tail_start[i + 1] == tail_start[i] && tail[i + 1] == tail[i];
        return tail_start[i + 1] >= previous;
    }

    // Whether the next row may be in the tile of row i.
    bool joins(int64_t i) const {
        if (continues(i)) return true;
        if (lengths[i] == 0 && lengths[i + 1] == 0) return true;
        return has_tails && tail_start[i + 1] < lengths[i + 1] && lengths[i] > 0 && same_pages(i);
    }

    bool has_tail(int64_t i) const { return tail_start[i] < lengths[i]; }
};

// Memory that is kept between calls.
struct Scratch {
    std::vector<Tile> narrow, wide, sorted;
    std::vector<int64_t> counts;
    std::vector<int32_t> begins;  // by row: whether a chain begins there
};

void add_tiles(std::vector<Tile> &tiles, int64_t row, int64_t end, int64_t max_rows) {
    for (; row < end; row += max_rows) {
        Tile tile{};
        tile.row = static_cast<int32_t>(row);
        tile.count = static_cast<int32_t>(std::min(max_rows, end - row));
        tiles.push_back(tile);
    }
}

void make_tiles(const TileConstants &plan, const PassRows &rows, Scratch &scratch) {
    scratch.narrow.clear();
    scratch.wide.clear();
    for (int64_t begin = 0, end; begin < rows.num; begin = end) {
        for (end = begin + 1; end < rows.num && rows.joins(end - 1); end++) {}
        if (!plan.wide_rows) {
            add_tiles(scratch.narrow, begin, end, plan.tile_rows);
            continue;
        }
        for (int64_t row = begin; row < end; row += plan.wide_rows) {
            int64_t stop = std::min(end, row + plan.wide_rows);
            bool is_wide = stop - row > 2 * plan.tile_rows && rows.lengths[row] > 0;
            for (int64_t i = row; is_wide && rows.has_tails && i < stop; i++) is_wide = !rows.has_tail(i);
            add_tiles(is_wide ? scratch.wide : scratch.narrow, row, stop,
                      is_wide ? plan.wide_rows : plan.tile_rows);
        }
    }
}

void measure(const TileConstants &plan, const PassRows &rows, Tile &tile) {
    const int32_t *lengths = rows.lengths + tile.row;
    tile.shortest = tile.shared = lengths[0];
    tile.longest = lengths[tile.count - 1];
    if (rows.has_tails) {
        tile.shortest = *std::min_element(lengths, lengths + tile.count);
        tile.longest = *std::max_element(lengths, lengths + tile.count);
        const int32_t *starts = rows.tail_start + tile.row;
        tile.shared = *std::min_element(starts, starts + tile.count);
    }
    if (plan.window >= 0) tile.first_split = std::max<int64_t>(tile.shortest - plan.window, 0) / plan.split;
    tile.splits = (tile.longest + plan.split - 1) / plan.split - tile.first_split;
}

// Longest first; tiles with equally many splits keep their order.
void sort_tiles(std::vector<Tile> &tiles, Scratch &scratch) {
    auto longer = [](const Tile &a, const Tile &b) { return a.splits > b.splits; };
    if (std::is_sorted(tiles.begin(), tiles.end(), longer)) return;
    int64_t most = 0;
    for (const Tile &tile : tiles) most = std::max(most, tile.splits);
    scratch.counts.assign(static_cast<size_t>(most) + 2, 0);
    int64_t *counts = scratch.counts.data();
    for (const Tile &tile : tiles) counts[most - tile.splits + 1]++;
    for (int64_t i = 0; i < most; i++) counts[i + 1] += counts[i];
    scratch.sorted.resize(tiles.size());
    for (const Tile &tile : tiles) scratch.sorted[static_cast<size_t>(counts[most - tile.splits]++)] = tile;
    tiles.swap(scratch.sorted);
}

// The chains of all rows; a tile begins and ends chains.
void write_chains(const std::vector<Tile> &tiles, const PassRows &rows, Scratch &scratch, int32_t *columns) {
    int64_t num = rows.num;
    scratch.begins.assign(static_cast<size_t>(num) + 1, 0);
    int32_t *begins = scratch.begins.data();
    begins[0] = begins[num] = 1;
    for (int64_t i = 0; i + 1 < num; i++) begins[i + 1] = !rows.continues(i);
    for (const Tile &tile : tiles) begins[tile.row] = begins[tile.row + tile.count] = 1;
    for (int64_t start = 0, end; start < num; start = end) {
        for (end = start + 1; !begins[end]; end++) {}
        columns[14 * num + start] = static_cast<int32_t>(end - start);
        columns[15 * num + start] = rows.tail_start[end - 1];
        columns[16 * num + start] = rows.tail[end - 1];
    }
    for (size_t i = 0; i < tiles.size(); i++) {
        const Tile &tile = tiles[i];
        int32_t chains = 1;
        for (int64_t row = tile.row + 1; row < tile.row + tile.count; row++) chains += begins[row];
        columns[2 * num + i] = columns[14 * num + tile.row];
        columns[5 * num + i] = rows.lengths[tile.row];
        columns[7 * num + i] = columns[15 * num + tile.row];
        columns[12 * num + i] = chains;
        columns[13 * num + i] = columns[16 * num + tile.row];
    }
}

void write_pieces(const TileConstants &plan, const std::vector<Tile> &tiles, bool uncut, int64_t num,
                  int32_t *work_list) {
    int64_t all_splits = 0;
    for (const Tile &tile : tiles) all_splits += tile.splits;
    double mean_splits = static_cast<double>(all_splits * plan.kv_heads) / static_cast<double>(plan.programs);
    double threshold = std::max(1.0, plan.cut_threshold * mean_splits);
    int32_t *slot = work_list + kHeaderLen + 10 * num, *piece = work_list + kHeaderLen + 11 * num;
    int64_t slots = 0, pieces = 0, cut_tiles = 0, cut_pieces = 0;
    for (size_t i = 0; i < tiles.size(); i++) {
        const Tile &tile = tiles[i];
        bool cut = !uncut && tile.splits > 0 && static_cast<double>(tile.splits) > threshold;
        int64_t first_slot = slots;
        if (cut) slots += tile.splits * tile.count;
        cut = cut && slots <= plan.num_slots;
        slot[i] = cut ? static_cast<int32_t>(first_slot) : -1;
        piece[i] = static_cast<int32_t>(pieces);
        pieces += cut ? tile.splits : 1;
        if (cut) {
            cut_tiles = static_cast<int64_t>(i) + 1;
            cut_pieces = pieces;
        }
    }
    work_list[0] = static_cast<int32_t>(pieces);
    work_list[1] = static_cast<int32_t>(cut_tiles);
    work_list[2] = static_cast<int32_t>(cut_pieces);
}

void write_list(const TileConstants &plan, std::vector<Tile> &tiles, const PassRows &rows, bool uncut,
                Scratch &scratch, int32_t *work_list) {
    if (tiles.empty()) {
        std::fill(work_list, work_list + kHeaderLen, 0);
        return;
    }
    for (Tile &tile : tiles) measure(plan, rows, tile);
    sort_tiles(tiles, scratch);
    int64_t num = rows.num;
    int32_t *columns = work_list + kHeaderLen;
    for (size_t i = 0; i < tiles.size(); i++) {
        const Tile &tile = tiles[i];
        columns[i] = tile.row;
        columns[num + i] = columns[2 * num + i] = tile.count;
        columns[3 * num + i] = columns[5 * num + i] = tile.shortest;
        columns[4 * num + i] = tile.shared;
        columns[6 * num + i] = columns[7 * num + i] = tile.longest;
        columns[8 * num + i] = rows.page_start[tile.row];
        columns[9 * num + i] = static_cast<int32_t>(tile.first_split);
        columns[12 * num + i] = 1;
    }
    if (rows.has_tails) write_chains(tiles, rows, scratch, columns);
    write_pieces(plan, tiles, uncut, num, work_list);
}

}  // namespace

// Write the list, or both lists, of a pass of `num_rows` rows. Returns 0, or -1 where memory ran out.
extern "C" int64_t samewise_write_tiles(const void *plan, int64_t num_rows, const int32_t *lengths,
                                        const int32_t *page_start, const int32_t *tail_start,
                                        const int32_t *tail, int32_t *work_list) try {
    static thread_local Scratch scratch;
    const auto &constants = *static_cast<const TileConstants *>(plan);
    PassRows rows{num_rows, lengths, page_start, tail_start, tail, false};
    for (int64_t i = 0; i < num_rows && !rows.has_tails; i++) rows.has_tails = rows.has_tail(i);
    make_tiles(constants, rows, scratch);
    write_list(constants, scratch.narrow, rows, false, scratch, work_list);
    if (constants.wide_rows) {
        work_list += kHeaderLen + kColumns * num_rows;
        write_list(constants, scratch.wide, rows, true, scratch, work_list);
    }
    return 0;
} catch (const std::bad_alloc &) {
    return -1;
}
