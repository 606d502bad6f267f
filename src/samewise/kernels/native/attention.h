// Attention in tasks, for kernels that share out the work themselves: the arithmetic of attention.cpp.

#pragma once

#include "calls.h"

#include <vector>

namespace samewise {

// Queries [begin, end) of a run of rows that share their pages; query x is row `row` + x / group. The keys of
// pages before `shared` are in the sequence's own pages for every row.
struct Tile { int64_t row, begin, end, first_page, end_page, shared; };

// How a call is cut up. It depends on the rows, their tables and the window, not on Q, K and V.
struct AttentionPlan {
    std::vector<Tile> tiles;
    int64_t out_row;   // elements from a row of `out` to the next
    int64_t room_len;  // floats a worker needs
    int64_t work;      // multiply-adds
    bool floats;       // whether Q, K, V and the result are float32, also where pages hold less
    int64_t num_tasks(const Call& c) const { return int64_t(tiles.size()) * c.kv_heads; }
};

// 0, or what `samewise_attend` returns for a call that cannot be. May throw std::bad_alloc.
int plan_attention(const Call& c, AttentionPlan& plan);

// Every row's K and V of one head to its slot. One worker owns a head: rows that share the trash page do not race.
void write_head(const Call& c, const AttentionPlan& plan, int64_t head);

// One task; K and V of its rows are written.
void attend_task(const Call& c, const AttentionPlan& plan, int64_t task, float* room);

// Zeros for rows that see nothing.
void clear_empty_rows(const Call& c, const AttentionPlan& plan);

}  // namespace samewise
