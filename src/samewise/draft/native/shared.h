// What sequences of one salt share: earlier texts, and recycled candidates by token.
//
// Shared owns the pools, the tables and the clock that tells which of them was used last; beyond the tuning's
// limits the oldest are dropped, so a pointer to one is good until the next call that stores or opens.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "interface.h"
#include "suffix_trie.h"

namespace samewise::drafting {

constexpr int kWidth = 8;  // candidates of a row

// Earlier texts of one salt.
struct Pool {
    std::vector<std::unique_ptr<Trie>> tries;  // the newer first
    uint64_t used = 0;

    size_t num_entries() const {
        size_t num = 0;
        for (const auto& trie : tries) num += trie->num_entries();
        return num;
    }

    void add(const int32_t* tokens, int64_t num, const DrafterTuning& tuning) {
        if (tries.empty()) tries.push_back(std::make_unique<Trie>(tuning));
        const int64_t half = tuning.store_entries / 2, per_token = 2 * (tuning.max_context + 1) + 1;
        const int64_t most = std::min(tuning.stored_tokens, std::max<int64_t>(1, (half - 1) / per_token));
        if (num > most) {
            tokens += num - most;
            num = most;
        }
        if (!tries[0]->tokens.empty() &&
            static_cast<int64_t>(tries[0]->num_entries()) + num * per_token + 1 > half) {
            tries.resize(1);
            tries.insert(tries.begin(), std::make_unique<Trie>(tuning));
        }
        tries[0]->extend(tokens, num);
        tries[0]->separate();
    }
};

// The candidates of the row that last followed each token, of one salt.
class Table {
  public:
    explicit Table(int64_t vocab)
        : vocab_(vocab), ids_(static_cast<int32_t*>(std::calloc(vocab, kWidth * sizeof(int32_t)))) {
        if (ids_ == nullptr) throw std::bad_alloc();
    }
    ~Table() { std::free(ids_); }
    Table(const Table&) = delete;
    Table& operator=(const Table&) = delete;

    uint64_t used = 0;

    void prefetch(int32_t token) const {
        if (has(token)) __builtin_prefetch(row(token));
    }

    void keep(int32_t token, const int32_t* ids) {
        if (!has(token)) return;
        int32_t* kept = row(token);
        for (int i = 0; i < kWidth; i++) kept[i] = ids[i] + 1;
    }

    // False: there are none.
    bool find(int32_t token, int32_t* ids) const {
        if (!has(token)) return false;
        const int32_t* kept = row(token);
        for (int i = 0; i < kWidth; i++) ids[i] = kept[i] - 1;
        return kept[0] > 0;
    }

  private:
    bool has(int32_t token) const { return token >= 0 && token < vocab_; }
    int32_t* row(int32_t token) const { return ids_ + static_cast<int64_t>(token) * kWidth; }

    const int64_t vocab_;
    int32_t* const ids_;  // plus one, 0 where there are none, so that fresh pages of memory need no filling
};

class Shared {
  public:
    explicit Shared(const DrafterTuning& tuning) : tuning_(tuning) {}

    // Null where the salt has none, or none any more.
    Pool* pool(const std::string& salt) const { return find(pools_, salt); }
    Table* table(const std::string& salt) const { return find(tables_, salt); }

    // Make the salt's table, or keep it: it is the latest now. Returns the time.
    uint64_t open_table(const std::string& salt) {
        Table* table = find(tables_, salt);
        if (table == nullptr) table = add(tables_, salt, std::make_unique<Table>(tuning_.vocab));
        table->used = ++clock_;
        drop_oldest(tables_, tuning_.max_tables);
        return clock_;
    }

    // Keep the salt's table for a sequence that last had rows for it at `last`, or make it again where one is
    // free or was not used since. Returns the time.
    uint64_t use_table(const std::string& salt, uint64_t last) {
        if (find(tables_, salt) != nullptr || static_cast<int64_t>(tables_.size()) < tuning_.max_tables ||
            oldest(tables_)->second->used < last)
            return open_table(salt);
        return ++clock_;
    }

    void store(const std::string& salt, const int32_t* tokens, int64_t num) {
        Pool* pool = find(pools_, salt);
        if (pool == nullptr) pool = add(pools_, salt, std::make_unique<Pool>());
        pool->used = ++clock_;
        pool->add(tokens, num, tuning_);
        drop_oldest(pools_, tuning_.max_pools);
        while (pools_.size() > 1 && stored_entries() > tuning_.store_entries)
            drop_oldest(pools_, static_cast<int64_t>(pools_.size()) - 1);
    }

    void clear() {
        pools_.clear();
        tables_.clear();
    }

    int64_t table_bytes() const {
        return static_cast<int64_t>(tables_.size()) * tuning_.vocab * kWidth * static_cast<int64_t>(sizeof(int32_t));
    }

    int64_t stored_bytes() const {
        int64_t bytes = 0;
        for (const auto& [salt, pool] : pools_)
            for (const auto& trie : pool->tries) bytes += static_cast<int64_t>(trie->nbytes());
        return bytes;
    }

  private:
    template <typename Kept>
    using BySalt = std::unordered_map<std::string, std::unique_ptr<Kept>>;

    template <typename Kept>
    static Kept* find(const BySalt<Kept>& kept, const std::string& salt) {
        const auto found = kept.find(salt);
        return found == kept.end() ? nullptr : found->second.get();
    }

    // Made before there is an entry: none is null, also where memory runs out.
    template <typename Kept>
    static Kept* add(BySalt<Kept>& kept, const std::string& salt, std::unique_ptr<Kept> made) {
        return kept.emplace(salt, std::move(made)).first->second.get();
    }

    // Of at least one.
    template <typename Kept>
    static typename BySalt<Kept>::const_iterator oldest(const BySalt<Kept>& kept) {
        return std::min_element(kept.begin(), kept.end(), [](const auto& a, const auto& b) {
            return a.second->used < b.second->used;
        });
    }

    template <typename Kept>
    static void drop_oldest(BySalt<Kept>& kept, int64_t most) {
        while (static_cast<int64_t>(kept.size()) > most) kept.erase(oldest(kept));
    }

    int64_t stored_entries() const {
        size_t num = 0;
        for (const auto& [salt, pool] : pools_) num += pool->num_entries();
        return static_cast<int64_t>(num);
    }

    const DrafterTuning& tuning_;
    BySalt<Pool> pools_;
    BySalt<Table> tables_;
    uint64_t clock_ = 0;
};

}  // namespace samewise::drafting
