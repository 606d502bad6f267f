// Suffix tries: which tokens followed each context of a text, and how often. suffix_counts.py in C++.
//
// A trie owns its text, its contexts and their children. A sequence owns the trie of its own text (sequences.h),
// a pool those of earlier texts (shared.h). A match is the caller's, and is of use for the trie that made it.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "interface.h"

namespace samewise::drafting {

constexpr int kMaxContext = 8;  // bounds of the tuning: sizes of arrays
constexpr int kMaxSuccessors = 4;
constexpr int32_t kSeparator = -1;      // stands between two texts
constexpr int32_t kEmpty = INT32_MIN;   // a free slot among the children
constexpr int32_t kNodeBase = 1 << 30;  // values from here on are nodes, others positions or counts

// The children of all nodes of a trie, by node and token; open addressing, at most 5/8 full.
class Children {
  public:
    int32_t* find(int32_t node, int32_t token) {
        for (size_t i = place(node, token);; i = (i + 1) & mask_) {
            Slot& slot = slots_[i];
            if (slot.value == kEmpty) return nullptr;
            if (slot.node == node && slot.token == token) return &slot.value;
        }
    }

    // Fetch the place of a key that is looked up soon: in a large trie it is in no cache.
    void prefetch(int32_t node, int32_t token) const { __builtin_prefetch(&slots_[place(node, token)]); }

    // The key must be new.
    void insert(int32_t node, int32_t token, int32_t value) {
        if (8 * (size_ + 1) > 5 * slots_.size()) grow();
        put({node, token, value});
        size_++;
    }

    size_t nbytes() const { return slots_.size() * sizeof(Slot); }

  private:
    struct Slot {
        int32_t node, token, value;
    };

    size_t place(int32_t node, int32_t token) const {
        const uint64_t key = static_cast<uint64_t>(static_cast<uint32_t>(node)) << 32 | static_cast<uint32_t>(token);
        return (key * 0x9E3779B97F4A7C15ull) >> shift_;
    }

    void put(const Slot& slot) {
        size_t i = place(slot.node, slot.token);
        while (slots_[i].value != kEmpty) i = (i + 1) & mask_;
        slots_[i] = slot;
    }

    void grow() {
        std::vector<Slot> old(2 * slots_.size(), Slot{0, 0, kEmpty});
        old.swap(slots_);
        mask_ = slots_.size() - 1;
        shift_--;
        for (const Slot& slot : old)
            if (slot.value != kEmpty) put(slot);
    }

    std::vector<Slot> slots_ = std::vector<Slot>(64, Slot{0, 0, kEmpty});
    size_t mask_ = 63, size_ = 0;
    int shift_ = 58;
};

// A context that occurred more than once.
struct Node {
    int32_t count = 0, total = 0, num_frequent = 0;
    int32_t frequent[kMaxSuccessors];
    int32_t times[kMaxSuccessors];  // occurrences of each
};

// Where the end of some text occurred in a trie.
struct Match {
    int32_t nodes[kMaxContext + 1];  // contexts that occurred more than once, longest first, the empty one last
    int32_t num;                     // of nodes
    int32_t position;                // after an occurrence of a longer context; -1: there is none
    int32_t length;                  // of the longest context
};

// A token that a source names as next. Its constructor lets lists of them grow in place: a mention that is built
// elsewhere and copied as a whole waits for the stores of its two halves.
struct Mention {
    Mention(int32_t named, int64_t weight) : token(named), index(static_cast<int32_t>(weight)) {}

    int32_t token, index;  // the index of source and class among the weights
};

// One text, or several with separators between them.
class Trie {
  public:
    explicit Trie(const DrafterTuning& tuning) : tuning_(tuning), nodes_(1) {
        open_.nodes[0] = 0;
        open_.num = 1;
    }

    std::vector<int32_t> tokens;

    size_t num_entries() const { return tokens.size() + num_children_; }
    size_t nbytes() const {
        return tokens.capacity() * sizeof(int32_t) + nodes_.capacity() * sizeof(Node) + children_.nbytes();
    }

    void extend(const int32_t* from, size_t num) {
        for (size_t i = 0; i < num; i++) append(from[i]);
    }

    void append(int32_t token) {
        const int32_t position = static_cast<int32_t>(tokens.size()) + 1;
        tokens.push_back(token);
        Match matched;
        matched.num = 0;
        int64_t depth = open_.num;
        for (int i = 0; i < open_.num; i++) {
            const int32_t node = open_.nodes[i];
            depth--;
            int32_t* child = children_.find(node, token);
            int32_t times = 1;
            if (child == nullptr) {
                children_.insert(node, token, position);
                num_children_++;
            } else if (*child >= kNodeBase) {
                times = ++nodes_[*child - kNodeBase].count;
                matched.nodes[matched.num++] = *child - kNodeBase;
            } else if (depth >= tuning_.max_context) {
                *child = *child >= 0 ? -2 : *child - 1;
                times = -*child;
            } else {
                const int32_t opened = static_cast<int32_t>(nodes_.size());
                const int32_t before = *child;
                *child = kNodeBase + opened;  // before inserting, which may move it
                open_context(before);
                matched.nodes[matched.num++] = opened;
                times = 2;
            }
            nodes_[node].total++;
            rank(nodes_[node], token, times);
        }
        matched.nodes[matched.num++] = 0;
        open_ = matched;
    }

    void separate() {
        tokens.push_back(kSeparator);
        open_.nodes[0] = 0;
        open_.num = 1;
    }

    Match match() const {
        Match match = open_;
        match.position = -1;
        match.length = match.num - 1;
        return match;
    }

    Match find(const int32_t* suffix, size_t num) {
        Match match;
        match.nodes[0] = 0;
        match.num = 1;
        match.position = -1;
        match.length = 0;
        for (size_t i = 0; i < num; i++) match = follow(match, suffix[i]);
        return match;
    }

    void prefetch(const Match& match, int32_t token) const {
        for (int i = 0; i < match.num; i++) children_.prefetch(match.nodes[i], token);
    }

    Match follow(const Match& match, int32_t token) {
        Match found;
        found.num = 0;
        int32_t followed = -1;
        if (match.position >= 0 && match.position < static_cast<int64_t>(tokens.size()) &&
            tokens[match.position] == token)
            followed = match.position + 1;
        int32_t depth = match.num, longest = followed >= 0 ? match.length + 1 : 0;
        for (int i = 0; i < match.num; i++, depth--) {
            const int32_t* child = children_.find(match.nodes[i], token);
            if (child == nullptr) continue;
            if (*child >= kNodeBase) {
                found.nodes[found.num++] = *child - kNodeBase;
                if (!longest) longest = depth;
            } else if (*child >= 0 && followed < 0) {
                followed = *child;
                longest = depth;
            }
        }
        found.nodes[found.num++] = 0;
        found.position = followed;
        found.length = longest;
        return found;
    }

    void name(const Match& match, int64_t source, std::vector<Mention>& mentions) const {
        int64_t num = 0;
        if (match.position >= 0 && match.position < static_cast<int64_t>(tokens.size())) {
            const int64_t length = std::max<int64_t>(1, std::min<int64_t>(match.length, tuning_.max_length));
            const int32_t token = tokens[match.position];
            if (token >= 0) mentions.emplace_back(token, source + match_class(length, 1, 1));
            num = 1;
        }
        int64_t depth = match.num - 1;
        for (int i = 0; i < match.num && depth && num < tuning_.max_successors; i++, depth--) {
            const Node& node = nodes_[match.nodes[i]];
            for (int j = 0; j < node.num_frequent; j++)
                mentions.emplace_back(node.frequent[j], source + match_class(depth, node.times[j], node.total));
            num += node.num_frequent;
        }
    }

  private:
    int64_t match_class(int64_t length, int64_t count, int64_t total) const {
        const int64_t share = std::min(tuning_.num_shares * count / total, tuning_.num_shares - 1);
        return ((std::min(length, tuning_.max_length) - 1) * tuning_.num_shares + share) * tuning_.max_total +
               std::min(total, tuning_.max_total) - 1;
    }

    void open_context(int32_t position) {
        const int32_t opened = static_cast<int32_t>(nodes_.size());
        nodes_.emplace_back();
        Node& node = nodes_.back();
        node.count = 2;
        num_children_++;
        const int32_t token = position < static_cast<int64_t>(tokens.size()) ? tokens[position] : kSeparator;
        if (token == kSeparator) return;
        node.frequent[0] = token;
        node.times[0] = 1;
        node.num_frequent = 1;
        node.total = 1;
        children_.insert(opened, token, position + 1);
        num_children_++;
    }

    void rank(Node& node, int32_t token, int32_t times) {
        int i = 0;
        while (i < node.num_frequent && node.frequent[i] != token) i++;
        if (i == node.num_frequent) {
            if (node.num_frequent < tuning_.max_successors) {
                node.num_frequent++;
            } else if (node.times[i - 1] <= times) {
                i--;
            } else {
                return;
            }
        }
        for (; i && node.times[i - 1] <= times; i--) {
            node.frequent[i] = node.frequent[i - 1];
            node.times[i] = node.times[i - 1];
        }
        node.frequent[i] = token;
        node.times[i] = times;
    }

    const DrafterTuning& tuning_;
    std::vector<Node> nodes_;
    Children children_;
    Match open_;  // contexts that end the text, longest first
    size_t num_children_ = 0;
};

}  // namespace samewise::drafting
