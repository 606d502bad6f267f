// From a frame's outputs to the next frame: judge, learn, grow, write. See samewise/follow_up.py.
//
// FollowUp owns the verdicts of the frame that landed; what it changes is the learner's and the grower's.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "frame_writer.h"
#include "interface.h"
#include "learner.h"
#include "sequences.h"
#include "tree.h"
#include "tree_grower.h"
#include "verdicts.h"

namespace samewise::drafting {

class FollowUp {
  public:
    FollowUp(const Sequences& sequences, const Learner& learner, TreeGrower& grower)
        : sequences_(sequences), learner_(learner), grower_(grower) {}

    // False, and nothing is changed: there is no next frame that could be made here.
    bool judge(const FrameToFollow& frame, const FrameOutputs& outputs) {
        return verdicts_.judge(frame, outputs, sequences_);
    }

    // Commit what was judged, grow the next trees and write the next frame. Returns the number of nodes.
    int64_t run(const FrameToFollow& frame, const FrameOutputs& outputs, const Prices& prices, const Trees& trees,
                NextFrame& next) {
        commit(frame, outputs);
        const int64_t num_nodes = grower_.grow(prices, trees);
        spread_counts(frame, trees);
        writer_.write(frame, verdicts_, trees, next);
        return num_nodes;
    }

  private:
    // Commit every verdict, and let the sequences that go on grow.
    void commit(const FrameToFollow& frame, const FrameOutputs& outputs) {
        const int32_t *inputs = frame.inputs, *row = outputs.rows, *stop_ids = frame.stop_ids;
        grower_.clear();
        for (int64_t i = 0; i < frame.num; i++) {
            const FollowedSequence& followed = frame.sequences[i];
            const Verdict& verdict = verdicts_[i];
            if (verdict.sequence != nullptr) {
                const int64_t first = followed.given - 1;
                commit_one(followed, inputs + first, row + first * outputs.stride, outputs, verdict);
                const int64_t room = followed.num_pages * frame.page - verdict.length;
                if (!verdict.ended)
                    grower_.add(*verdict.sequence, {std::min(frame.max_nodes, room),
                                                    std::min(frame.max_depth, followed.max_len - verdict.length - 1),
                                                    stop_ids, stop_ids + followed.num_stop_ids});
            }
            inputs += followed.num_rows;
            stop_ids += followed.num_stop_ids;
            row += followed.num_rows * outputs.stride;
        }
    }

    // `inputs` and `row` are those of the last known token's row.
    void commit_one(const FollowedSequence& followed, const int32_t* inputs, const int32_t* row,
                    const FrameOutputs& outputs, const Verdict& verdict) {
        const int64_t num_rows = outputs.candidates ? followed.num_rows - followed.given + 1 : 0;
        candidates_.resize(num_rows * kWidth);
        for (int64_t j = 0; j < num_rows; j++) {
            const int32_t* ids = row + j * outputs.stride + outputs.candidates;
            std::copy(ids, ids + kWidth, candidates_.data() + j * kWidth);
        }
        learner_.commit(*verdict.sequence, {verdicts_.tokens(verdict), verdict.num_tokens, verdicts_.path(verdict),
                                            inputs, candidates_.data(), num_rows});
    }

    // From a count for each tree to one for each sequence of the frame, in place.
    void spread_counts(const FrameToFollow& frame, const Trees& trees) const {
        int64_t grown = static_cast<int64_t>(grower_.num_growing());
        for (int64_t i = frame.num - 1; i >= 0; i--)
            trees.counts[i] =
                verdicts_[i].sequence != nullptr && !verdicts_[i].ended ? trees.counts[--grown] : 0;
    }

    const Sequences& sequences_;
    const Learner& learner_;
    TreeGrower& grower_;
    Verdicts verdicts_;
    FrameWriter writer_;
    std::vector<int32_t> candidates_;  // of one sequence's rows; kept for its memory
};

}  // namespace samewise::drafting
