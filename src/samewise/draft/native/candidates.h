// The candidates for the token after a path: what texts, the prediction and rows name there, ranked by the
// estimates. The part "what is named after a path" of tree_drafter.py in C++.
//
// No state of its own: it reads Shared, Estimates and the sequence, and appends to the sequence's tree.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "estimates.h"
#include "interface.h"
#include "sequences.h"
#include "shared.h"
#include "tree.h"

namespace samewise::drafting {

class Candidates {
  public:
    Candidates(const DrafterTuning& tuning, const Shared& shared, const Estimates& estimates)
        : tuning_(tuning), shared_(shared), estimates_(estimates) {}

    // Begin a sequence's next tree: its first end is that of the known text.
    void set_root(Sequence& sequence) const {
        sequence.tree.clear();
        sequence.read_all();
        sequence.find_table(shared_);
        sequence.find_pool(shared_);
        const std::vector<int32_t>& text = sequence.text.tokens;
        const size_t num = std::min<size_t>(tuning_.max_context, text.size() - sequence.start);
        End root;
        root.own = sequence.text.match();
        for (size_t i = 0; i < num_tries(sequence); i++)
            root.stored[i] = sequence.pool->tries[i]->find(text.data() + text.size() - num, num);
        root.depth = 0;
        root.cursor = sequence.prediction.cursor;
        root.agreed = sequence.prediction.agreed;
        append(sequence, root, text.back());
    }

    // The index of the end that is one token after another one.
    int32_t expand(Sequence& sequence, int32_t before, int32_t token) const {
        End end;
        const End& from = sequence.tree.ends[before];
        if (sequence.table != nullptr) sequence.table->prefetch(token);
        for (size_t i = 0; i < num_tries(sequence); i++)
            sequence.pool->tries[i]->prefetch(from.stored[i], token);
        end.own = tuning_.suffixes ? sequence.text.follow(from.own, token) : from.own;
        for (size_t i = 0; i < num_tries(sequence); i++)
            end.stored[i] = sequence.pool->tries[i]->follow(from.stored[i], token);
        end.depth = from.depth + 1;
        const bool predicted = sequence.prediction.says(from.cursor, token);
        end.cursor = predicted ? from.cursor + 1 : -1;
        end.agreed = predicted ? from.agreed + 1 : 0;
        append(sequence, end, token);
        return static_cast<int32_t>(sequence.tree.ends.size()) - 1;
    }

  private:
    static size_t num_tries(const Sequence& sequence) {
        return sequence.pool == nullptr ? 0 : sequence.pool->tries.size();
    }

    // Append the end of a path that ends with `token`, what the sources name after it, and the candidates.
    void append(Sequence& sequence, End& end, int32_t token) const {
        GrownTree& tree = sequence.tree;
        end.first_mention = static_cast<int32_t>(tree.mentions.size());
        int64_t own_length = 0, stored_length = 0;
        bool recycled = false;
        if (tuning_.suffixes) {
            own_length = end.own.length;
            stored_length = name_texts(sequence, end);
        }
        if (tuning_.rows) recycled = name_rows(sequence, end, token);
        end.context = estimates_.context_class(own_length, stored_length, recycled);
        end.num_mentions = static_cast<int32_t>(tree.mentions.size()) - end.first_mention;
        estimates_.rank(tree, end, sequence.seen);
        tree.ends.push_back(end);
    }

    // The prediction, the own text and stored ones; the length of the longest match in the latter.
    int64_t name_texts(Sequence& sequence, const End& end) const {
        std::vector<Mention>& mentions = sequence.tree.mentions;
        if (sequence.prediction.reaches(end.cursor))
            mentions.emplace_back(sequence.prediction.tokens[end.cursor],
                                  tuning_.predicted + std::min<int64_t>(end.agreed, tuning_.max_length));
        sequence.text.name(end.own, tuning_.own, mentions);
        int64_t stored_length = 0;
        for (size_t i = 0; i < num_tries(sequence); i++) {
            if (end.stored[i].length <= stored_length) continue;
            stored_length = end.stored[i].length;
            sequence.pool->tries[i]->name(end.stored[i], tuning_.stored, mentions);
        }
        return stored_length;
    }

    // The row that last followed the token, and runners-up; whether there was such a row.
    bool name_rows(Sequence& sequence, const End& end, int32_t token) const {
        std::vector<Mention>& mentions = sequence.tree.mentions;
        const int64_t most = end.depth ? tuning_.deep_ranks : kWidth;
        int32_t ids[kWidth];
        const bool recycled = sequence.find_row(token, ids);
        if (recycled)
            for (int64_t i = 0; i < most; i++)
                if (ids[i] >= 0) mentions.emplace_back(ids[i], tuning_.recycled + i);
        for (int lag = 0; lag < sequence.num_beaten && lag + end.depth < tuning_.max_distance; lag++) {
            const Runners& runners = sequence.beaten[lag];
            const int64_t source = tuning_.runners_up + kWidth * (lag + end.depth);
            for (int64_t i = 0; i < std::min<int64_t>(most, runners.num); i++)
                if (runners.ids[i] >= 0) mentions.emplace_back(runners.ids[i], source + runners.ranks[i]);
        }
        return recycled;
    }

    const DrafterTuning& tuning_;
    const Shared& shared_;
    const Estimates& estimates_;
};

}  // namespace samewise::drafting
