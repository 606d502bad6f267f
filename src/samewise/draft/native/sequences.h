// The sequences that are drafted for, and what is known of each.
//
// Sequences owns them, and each of them its text, its prediction, its rows and its last tree. A sequence only
// points to what it shares with others of its salt, which Shared owns.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "interface.h"
#include "prediction.h"
#include "shared.h"
#include "suffix_trie.h"
#include "token_set.h"
#include "tree.h"

namespace samewise::drafting {

constexpr int kMaxRows = 4;  // bound of the tuning's num_rows

// Of a committed row, the candidates that were not chosen.
struct Runners {
    int32_t num, ids[kWidth], ranks[kWidth];
};

struct Row {
    int32_t ids[kWidth];
};

struct Sequence {
    explicit Sequence(const DrafterTuning& tuning)
        : text(tuning), counted(tuning.suffixes != 0), seen(tuning.vocab) {}

    Trie text;     // behind the prediction, from `start` on
    bool counted;  // whether contexts of the text are counted
    TokenSet seen;
    size_t start = 0;
    Prediction prediction;
    std::vector<int32_t> unread;  // of the prediction, kSeparator and the text: what is indexed by and by
    size_t num_read = 0;          // of these
    bool shares = false;  // with others of its salt
    std::string salt;
    uint64_t rows_kept = 0;  // by Shared's clock: when the sequence last had a table, or rows for one
    int num_beaten = 0;
    Runners beaten[kMaxRows];                   // of the last committed rows, the latest first
    std::unordered_map<int32_t, Row> recycled;  // by token, where the sequence does not share
    GrownTree tree;                             // the last one
    // Good during the current call only.
    Pool* pool = nullptr;
    Table* table = nullptr;
    Limit limit;

    // The text to index, behind what the caller predicts of its end.
    void begin(const int32_t* tokens, size_t num, const int32_t* predicted, size_t num_predicted) {
        unread.reserve(num_predicted + 1 + num);
        if (num_predicted) {
            prediction.tokens.assign(predicted, predicted + num_predicted);
            prediction.cursor = 0;
            unread.assign(predicted, predicted + num_predicted);
            unread.push_back(kSeparator);
        }
        start = unread.size();
        unread.insert(unread.end(), tokens, tokens + num);
    }

    // Index at most so many tokens. Returns how many are left.
    size_t read(size_t most) {
        const size_t end = std::min(unread.size(), num_read + most);
        for (; num_read < end; num_read++) {
            if (unread[num_read] == kSeparator)
                text.separate();
            else
                extend(&unread[num_read], 1);
        }
        if (num_read < unread.size()) return unread.size() - num_read;
        unread = std::vector<int32_t>();
        num_read = 0;
        return 0;
    }

    void read_all() {
        if (!unread.empty()) read(unread.size());
    }

    void extend(const int32_t* tokens, size_t num) {
        if (counted)
            text.extend(tokens, num);
        else
            text.tokens.insert(text.tokens.end(), tokens, tokens + num);
        for (size_t i = 0; i < num; i++) seen.add(tokens[i]);
    }

    void find_pool(const Shared& shared) { pool = shares ? shared.pool(salt) : nullptr; }
    void find_table(const Shared& shared) { table = shares ? shared.table(salt) : nullptr; }

    // The candidates of the row that last followed a token, in the salt's table or the sequence's own.
    void keep_row(int32_t token, const int32_t* ids) {
        if (!shares)
            std::copy(ids, ids + kWidth, recycled[token].ids);
        else if (table != nullptr)
            table->keep(token, ids);
    }

    // False: there are none.
    bool find_row(int32_t token, int32_t* ids) const {
        if (shares) return table != nullptr && table->find(token, ids);
        const auto found = recycled.find(token);
        if (found == recycled.end() || found->second.ids[0] < 0) return false;
        std::copy(found->second.ids, found->second.ids + kWidth, ids);
        return true;
    }

    void drop_rows() {
        num_beaten = 0;
        recycled.clear();
    }

    size_t nbytes() const {
        return text.nbytes() + seen.nbytes() +
               (prediction.tokens.capacity() + unread.capacity()) * sizeof(int32_t) +
               recycled.size() * 64 + tree.nbytes();
    }
};

class Sequences {
  public:
    // Null where the id is not known.
    Sequence* get(int64_t id) const {
        const auto found = by_id_.find(id);
        return found == by_id_.end() ? nullptr : found->second.get();
    }

    void add(int64_t id, std::unique_ptr<Sequence> sequence) { by_id_[id] = std::move(sequence); }

    // No longer one of them; null where the id is not known.
    std::unique_ptr<Sequence> take(int64_t id) {
        const auto found = by_id_.find(id);
        if (found == by_id_.end()) return nullptr;
        std::unique_ptr<Sequence> sequence = std::move(found->second);
        by_id_.erase(found);
        return sequence;
    }

    void clear() { by_id_.clear(); }

    auto begin() const { return by_id_.begin(); }
    auto end() const { return by_id_.end(); }

  private:
    std::unordered_map<int64_t, std::unique_ptr<Sequence>> by_id_;
};

}  // namespace samewise::drafting
