// Draft trees for many sequences: tree_drafter.py, suffix_counts.py, estimates.py and tree.py in C++.
//
// The Python modules are the reference: the same candidates, the same sums of doubles in the same order, so
// the same trees. What each step means is said there. All state belongs to a Drafter, made and deleted through
// the C functions at the end; a function that returns a status gives 0, or -1 where memory ran out. After -1
// only recover() or drafter_delete() may follow.
//
// One translation unit; each part is a header beside this file:
//
//   suffix_trie.h, token_set.h, prediction.h, tree.h   what a sequence is made of
//   shared.h, sequences.h, estimates.h                 state: by salt, by sequence, of all
//   candidates.h, tree_grower.h, tree_cutter.h         from a text to its tree
//   learner.h                                          from a verdict to what it teaches
//   verdicts.h, frame_writer.h, follow_up.h            from a frame's outputs to the next frame
//   interface.h                                        structs of the C functions

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "candidates.h"
#include "estimates.h"
#include "follow_up.h"
#include "interface.h"
#include "learner.h"
#include "sequences.h"
#include "shared.h"
#include "tree.h"
#include "tree_grower.h"

namespace samewise::drafting {

struct Drafter {
    Drafter(const DrafterTuning& given, const double* first_weights)
        : tuning(given), estimates(tuning, first_weights) {}
    Drafter(const Drafter&) = delete;  // the parts refer to each other
    Drafter& operator=(const Drafter&) = delete;

    const DrafterTuning tuning;
    // State.
    Estimates estimates;
    Shared shared{tuning};
    Sequences sequences;
    bool damaged = false;  // memory ran out inside a call: what is shared may be incomplete
    // Steps.
    const Candidates candidates{tuning, shared, estimates};
    const Learner learner{tuning, shared, estimates};
    TreeGrower grower{tuning, candidates};
    FollowUp follow_up{sequences, learner, grower};

    // A prediction is cut at the first token that is not of the vocabulary: no tree may have it.
    void begin(int64_t id, const int32_t* tokens, size_t num, const char* salt, int64_t salt_len,
               const int32_t* prediction, size_t num_predicted) {
        const int32_t* outside = std::find_if(prediction, prediction + num_predicted, [&](int32_t token) {
            return token < 0 || token >= tuning.vocab;
        });
        auto sequence = std::make_unique<Sequence>(tuning);
        sequence->begin(tokens, num, prediction, outside - prediction);
        if (salt_len >= 0) {
            sequence->shares = true;
            sequence->salt.assign(salt, salt_len);
            if (tuning.rows) sequence->rows_kept = shared.open_table(sequence->salt);
        }
        sequences.add(id, std::move(sequence));
    }

    void forget(int64_t id, bool store) {
        const std::unique_ptr<Sequence> sequence = sequences.take(id);
        if (sequence == nullptr || !store || !tuning.suffixes || !sequence->shares) return;
        if (!sequence->unread.empty()) return;
        const std::vector<int32_t>& text = sequence->text.tokens;
        const int64_t num = static_cast<int64_t>(text.size() - sequence->start);
        if (num >= 2) shared.store(sequence->salt, text.data() + sequence->start, num);
    }

    // Drop all sequences; after memory ran out, tables and stored texts too.
    void recover() {
        sequences.clear();
        grower.clear();
        if (damaged) shared.clear();
        damaged = false;
    }

    // Drop tables, stored texts and rows. Texts and estimates stay; a table is made again with its first row.
    void clear() {
        shared.clear();
        for (const auto& [id, sequence] : sequences) {
            sequence->tree.clear();
            sequence->drop_rows();
        }
    }

    void memory(int64_t* bytes) const {
        bytes[0] = shared.table_bytes();
        bytes[1] = shared.stored_bytes();
        bytes[2] = 0;
        for (const auto& [id, sequence] : sequences) bytes[2] += static_cast<int64_t>(sequence->nbytes());
    }
};

// Run a call; no exception may reach C.
template <typename Call>
int64_t guarded(Drafter* drafter, Call call) {
    try {
        return call();
    } catch (...) {
        drafter->damaged = true;
        return -1;
    }
}

extern "C" {

Drafter* drafter_new(const DrafterTuning* tuning, const double* first_weights) {
    if (tuning->max_context > kMaxContext || tuning->max_successors > kMaxSuccessors || tuning->num_rows > kMaxRows)
        return nullptr;
    try {
        return new Drafter(*tuning, first_weights);
    } catch (...) {
        return nullptr;
    }
}

void drafter_delete(Drafter* drafter) { delete drafter; }

int64_t drafter_begin(Drafter* drafter, int64_t id, const int32_t* tokens, int64_t num, const char* salt,
                      int64_t salt_len, const int32_t* prediction, int64_t num_predicted) {
    return guarded(drafter, [&] {
        drafter->begin(id, tokens, num, salt, salt_len, prediction, num_predicted);
        return 0;
    });
}

// Index at most so many tokens of a sequence that was begun. Returns how many are left; 0 for an unknown one.
int64_t drafter_index(Drafter* drafter, int64_t id, int64_t most) {
    return guarded(drafter, [&]() -> int64_t {
        Sequence* sequence = drafter->sequences.get(id);
        return sequence == nullptr ? 0 : static_cast<int64_t>(sequence->read(most));
    });
}

// `num_tokens` and `num_rows` by sequence; `tokens` and `path` (the row that chose each token), `inputs` and
// `ids` [rows, 8] of all sequences one after another. Sequences that are not known are passed over.
int64_t drafter_commit(Drafter* drafter, int64_t num, const int64_t* ids, const int64_t* num_tokens,
                       const int32_t* tokens, const int32_t* path, const int64_t* num_rows, const int32_t* inputs,
                       const int32_t* candidates) {
    return guarded(drafter, [&] {
        for (int64_t i = 0; i < num; i++) {
            Sequence* sequence = drafter->sequences.get(ids[i]);
            if (sequence != nullptr)
                drafter->learner.commit(*sequence,
                                        {tokens, num_tokens[i], path, inputs, candidates, num_rows[i]});
            tokens += num_tokens[i];
            path += num_tokens[i];
            inputs += num_rows[i];
            candidates += num_rows[i] * kWidth;
        }
        return 0;
    });
}

// The number of nodes of all trees, at most `budget`; `counts` by sequence, the other outputs one tree after
// another; -2 for an unknown sequence, -1 where memory ran out. `seconds` has budget + 1 entries.
int64_t drafter_grow(Drafter* drafter, int64_t num, const int64_t* ids, const int64_t* max_nodes,
                     const int64_t* max_depths, int64_t live, double own, double gap, const double* seconds,
                     int64_t budget, double min_prob, int64_t* counts, int32_t* tokens, int32_t* parents, double* probs, double* brought) {
    for (int64_t i = 0; i < num; i++)
        if (drafter->sequences.get(ids[i]) == nullptr) return -2;
    return guarded(drafter, [&] {
        drafter->grower.clear();
        for (int64_t i = 0; i < num; i++)
            drafter->grower.add(*drafter->sequences.get(ids[i]), {max_nodes[i], max_depths[i], nullptr, nullptr});
        return drafter->grower.grow({live, own, gap, seconds, budget, min_prob},
                                    {counts, tokens, parents, probs, brought});
    });
}

// The verdicts of a frame, then trees as drafter_grow() gives them, with a count for every sequence, and the next
// frame. -3, and nothing is changed: a sequence is not known or has too few pages, or all have ended.
int64_t drafter_follow_up(Drafter* drafter, const FrameToFollow* frame, const FrameOutputs* outputs, int64_t live,
                          double own, double gap, const double* seconds, int64_t budget, double min_prob,
                          int64_t* counts, int32_t* tokens, int32_t* parents, double* probs, double* brought,
                          NextFrame* next) {
    return guarded(drafter, [&]() -> int64_t {
        if (!drafter->follow_up.judge(*frame, *outputs)) return -3;
        return drafter->follow_up.run(*frame, *outputs, {live, own, gap, seconds, budget, min_prob},
                                      {counts, tokens, parents, probs, brought}, *next);
    });
}

int64_t drafter_forget(Drafter* drafter, int64_t id, int64_t store) {
    return guarded(drafter, [&] {
        drafter->forget(id, store != 0);
        return 0;
    });
}

void drafter_recover(Drafter* drafter) { drafter->recover(); }

int64_t drafter_clear(Drafter* drafter) {
    return guarded(drafter, [&] {
        drafter->clear();
        return 0;
    });
}

// Bytes of tables, stored texts and sequences.
void drafter_memory(const Drafter* drafter, int64_t* bytes) { drafter->memory(bytes); }

// The weights of the estimates, 2 * again of them.
const double* drafter_weights(const Drafter* drafter) { return drafter->estimates.weights(); }

}  // extern "C"

}  // namespace samewise::drafting
