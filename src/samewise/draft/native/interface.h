// The structs that the C functions of drafter.cpp take, mirrored by ctypes in drafter.py. Plain data, all of it
// the caller's: the drafter copies the tuning and keeps no pointer to anything else after a call.

#pragma once

#include <cstdint>

namespace samewise::drafting {

// Constants of the Python reference are passed, so that each is written once.
struct DrafterTuning {
    int64_t vocab;
    int64_t suffixes;  // whether texts and predictions are used
    int64_t rows;      // whether recycled candidates and runners-up are used
    int64_t max_context;
    int64_t max_successors;
    int64_t store_entries;
    int64_t max_pools;
    int64_t stored_tokens;
    int64_t min_resync;
    int64_t deep_ranks;
    int64_t num_rows;
    int64_t max_tables;
    int64_t check_nodes;
    int64_t max_length;
    int64_t num_shares;
    int64_t max_total;
    int64_t max_distance;
    int64_t own;  // indices of weights
    int64_t stored;
    int64_t recycled;
    int64_t runners_up;
    int64_t predicted;
    int64_t occurred;
    int64_t again;
    double step;
    double first_squares;
    double max_squares;
    double patience;
};

// One sequence of the next frame, or of the one that has landed. The order of its fields is that of
// samewise/follow_up.py, which says more of them.
struct FollowedSequence {
    int64_t id;
    int64_t num_rows;     // in the frame that has landed
    int64_t given;        // of them, or of the rows to come, known tokens; the others are guesses
    int64_t num_parents;  // 0: the guesses are a chain
    int64_t start;        // position of the first row
    int64_t next_given;   // above 0: known tokens that are left to read; there is nothing to judge
    int64_t next_rows;    // of them, in the next frame
    int64_t max_len;      // tokens at which it ends
    int64_t num_pages;
    int64_t num_stop_ids;
};

// The arrays hold the sequences' numbers one after another.
struct FrameToFollow {
    int64_t num;        // of sequences
    int64_t page;       // slots of a KV page
    int64_t max_nodes;  // of a sequence's next draft
    int64_t max_depth;
    const FollowedSequence* sequences;
    const int32_t* inputs;
    const int32_t* parents;
    const int32_t* next_inputs;
    const int32_t* pages;
    const int32_t* stop_ids;
};

// Where the next frame is written, as pack.cpp reads it, and how much of it there is.
struct NextFrame {
    int32_t* numbers;
    int32_t* pages;
    int64_t num_spans, num_rows, num_moves, num_numbers, num_pages;
};

// What the frame's rows gave: `stride` numbers each, the token first, the candidates from `candidates` on (0:
// there are none).
struct FrameOutputs {
    const int32_t* rows;
    int64_t stride;
    int64_t candidates;
};

}  // namespace samewise::drafting
