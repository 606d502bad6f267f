// What a frame's outputs say of its guesses. judge.py in C++.
//
// Verdicts owns those of the last frame that was judged, one for each of its sequences, and their accepted rows and
// tokens one after another.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "interface.h"
#include "sequences.h"

namespace samewise::drafting {

// A sequence's verdict. Its rows and tokens are those of Verdicts::path() and Verdicts::tokens().
struct Verdict {
    Sequence* sequence;  // null: nothing to judge
    int32_t first_path, num_rows;
    int32_t num_tokens;  // of the rows, up to the end of the text
    bool ended;
    int64_t length;  // tokens of the sequence, the new ones among them
};

class Verdicts {
  public:
    const Verdict& operator[](int64_t i) const { return verdicts_[i]; }

    // The accepted rows, counted from that of the last known token, and the tokens that they chose.
    const int32_t* path(const Verdict& verdict) const { return path_.data() + verdict.first_path; }
    const int32_t* tokens(const Verdict& verdict) const { return tokens_.data() + verdict.first_path; }

    // Judge every sequence. False, and no sequence is changed: one is not known or lacks pages, or all have ended.
    bool judge(const FrameToFollow& frame, const FrameOutputs& outputs, const Sequences& sequences) {
        verdicts_.clear();
        path_.clear();
        tokens_.clear();
        const int32_t *inputs = frame.inputs, *parents = frame.parents, *stop_ids = frame.stop_ids;
        const int32_t* row = outputs.rows;
        bool any_left = false;
        for (int64_t i = 0; i < frame.num; i++) {
            const FollowedSequence& followed = frame.sequences[i];
            Verdict verdict{nullptr, static_cast<int32_t>(path_.size()), 0, 0, false, 0};
            if (!followed.next_given) {
                verdict.sequence = sequences.get(followed.id);
                if (verdict.sequence == nullptr) return false;
                const int64_t first = followed.given - 1;
                accept(followed, inputs + first, parents, row + first * outputs.stride, outputs.stride, verdict);
                find_end(followed, stop_ids, verdict);
                if (verdict.length > followed.num_pages * frame.page) return false;
            }
            any_left = any_left || (verdict.sequence != nullptr ? !verdict.ended : followed.next_rows > 0);
            verdicts_.push_back(verdict);
            inputs += followed.num_rows;
            parents += followed.num_parents;
            stop_ids += followed.num_stop_ids;
            row += followed.num_rows * outputs.stride;
        }
        return any_left;
    }

  private:
    // The path of right guesses; all pointers are at the last known token's row.
    void accept(const FollowedSequence& followed, const int32_t* inputs, const int32_t* parents, const int32_t* row,
                int64_t stride, Verdict& verdict) {
        for (int64_t at = 0; at >= 0; at = child(followed, inputs, parents, at, row[at * stride])) {
            path_.push_back(static_cast<int32_t>(at));
            tokens_.push_back(row[at * stride]);
            verdict.num_rows++;
        }
    }

    // The row of the first guess after row `at` that is this token; -1: there is none.
    static int64_t child(const FollowedSequence& followed, const int32_t* inputs, const int32_t* parents, int64_t at,
                         int32_t token) {
        const int64_t num_rows = followed.num_rows - followed.given + 1;
        if (!followed.num_parents) return at + 1 < num_rows && inputs[at + 1] == token ? at + 1 : -1;
        for (int64_t next = at + 1; next < num_rows; next++)
            if (parents[next - 1] == at - 1 && inputs[next] == token) return next;
        return -1;
    }

    // Where the new tokens end the text, if they do.
    void find_end(const FollowedSequence& followed, const int32_t* stop_ids, Verdict& verdict) const {
        const int64_t known = followed.start + followed.given;
        const int32_t *chosen = tokens(verdict), *last_stop = stop_ids + followed.num_stop_ids;
        while (!verdict.ended && verdict.num_tokens < verdict.num_rows) {
            verdict.ended = std::find(stop_ids, last_stop, chosen[verdict.num_tokens]) != last_stop;
            verdict.num_tokens++;
            verdict.ended = verdict.ended || known + verdict.num_tokens >= followed.max_len;
        }
        verdict.length = known + verdict.num_tokens;
    }

    std::vector<Verdict> verdicts_;
    std::vector<int32_t> path_, tokens_;
};

}  // namespace samewise::drafting
