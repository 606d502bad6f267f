// What a frame's verdict teaches about a sequence. The part "what a frame tells" of tree_drafter.py in C++.
//
// No state of its own: it changes the sequence, the weights of Estimates and the tables of Shared.

#pragma once

#include <algorithm>
#include <cstdint>

#include "estimates.h"
#include "interface.h"
#include "sequences.h"
#include "shared.h"

namespace samewise::drafting {

// Tokens that a frame committed for a sequence, and the candidates of the sequence's rows. Without candidates
// num_rows is 0, and path, inputs and ids are not read.
struct Committed {
    const int32_t* tokens;
    int64_t num_tokens;
    const int32_t* path;    // the row that chose each token
    const int32_t* inputs;  // of all rows, rejected ones too
    const int32_t* ids;     // kWidth of each row
    int64_t num_rows;
};

class Learner {
  public:
    Learner(const DrafterTuning& tuning, Shared& shared, Estimates& estimates)
        : tuning_(tuning), shared_(shared), estimates_(estimates) {}

    // Learn from the last tree, keep the rows' candidates, and append the tokens.
    void commit(Sequence& sequence, const Committed& committed) const {
        const int32_t* tokens = committed.tokens;
        const int64_t num = committed.num_tokens;
        sequence.read_all();
        learn(sequence, tokens, num);
        if (tuning_.rows) {
            keep_rows(sequence, committed);
            keep_runners(sequence, committed);
        }
        sequence.extend(tokens, num);
        sequence.prediction.follow(tokens, num, sequence.text.tokens, sequence.start, tuning_);
    }

  private:
    // The root and each right node tell which of their candidates came.
    void learn(Sequence& sequence, const int32_t* truth, int64_t num) const {
        GrownTree& tree = sequence.tree;
        int32_t node = kRoot;
        for (int64_t i = 0; i < num && !tree.ends.empty(); i++) {
            const int32_t end = node == kRoot ? 0 : tree.nodes[node].end;
            if (end >= 0) estimates_.learn(tree, tree.ends[end], sequence.seen, truth[i]);
            node = tree.child(node, truth[i]);
            if (node < 0) break;
        }
        tree.clear();
    }

    // Recycle all rows, those of committed tokens last.
    void keep_rows(Sequence& sequence, const Committed& committed) const {
        if (!committed.num_rows) return;
        if (sequence.shares) sequence.rows_kept = shared_.use_table(sequence.salt, sequence.rows_kept);
        sequence.find_table(shared_);
        const int32_t *path = committed.path, *path_end = path + committed.num_tokens;
        const auto keep = [&](int64_t row) {
            sequence.keep_row(committed.inputs[row], committed.ids + row * kWidth);
        };
        for (int64_t row = 0; row < committed.num_rows; row++)
            if (std::find(path, path_end, row) == path_end) keep(row);
        std::for_each(path, path_end, keep);
    }

    // Of the latest rows, keep what was not chosen.
    void keep_runners(Sequence& sequence, const Committed& committed) const {
        if (!committed.num_rows) {
            sequence.num_beaten = 0;
            return;
        }
        Runners beaten[kMaxRows];
        int kept = 0;
        for (int64_t i = committed.num_tokens - 1; i >= 0 && kept < tuning_.num_rows; i--)
            beaten[kept++] = without(committed.ids + committed.path[i] * kWidth, committed.tokens[i]);
        for (int i = 0; i < sequence.num_beaten && kept < tuning_.num_rows; i++) beaten[kept++] = sequence.beaten[i];
        std::copy(beaten, beaten + kept, sequence.beaten);
        sequence.num_beaten = kept;
    }

    // The candidates but for one, which need not be among them, and the rank of each.
    static Runners without(const int32_t* ids, int32_t chosen) {
        Runners runners;
        runners.num = 0;
        for (int rank = 0; rank < kWidth; rank++) {
            if (ids[rank] == chosen) continue;
            runners.ids[runners.num] = ids[rank];
            runners.ranks[runners.num++] = rank;
        }
        return runners;
    }

    const DrafterTuning& tuning_;
    Shared& shared_;
    Estimates& estimates_;
};

}  // namespace samewise::drafting
