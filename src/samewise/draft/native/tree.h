// A tree of guesses: as it grows, what its nodes may cost, and where it is written. tree.py's data in C++.
//
// Plain data. Each sequence owns its last tree, until the frame that verified it is committed; tree_grower.h
// makes it, tree_cutter.h writes it, estimates.h learns from it.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "suffix_trie.h"

namespace samewise::drafting {

constexpr int32_t kRoot = -1;  // the parent of a tree's first nodes: the last known token

// How far a sequence's tree may grow. Guesses after a stop id are not written; the ids are good during the call
// only.
struct Limit {
    int64_t max_nodes = 0, max_depth = 0;
    const int32_t *stop_ids = nullptr, *stop_ids_end = nullptr;

    bool stops_at(int32_t token) const { return std::find(stop_ids, stop_ids_end, token) != stop_ids_end; }
};

// What nodes cost: `seconds` of a frame with 0 to `budget` nodes. The other fields are tree.py's.
struct Prices {
    int64_t live;
    double own, gap;
    const double* seconds;
    int64_t budget;
    double min_prob;
};

// Where trees are written: the number of nodes of each, and all nodes one tree after another.
struct Trees {
    int64_t* counts;
    int32_t *tokens, *parents;
    double *probs, *brought;
};

// A candidate for the token after a path. Constructed in place, as a Mention is.
struct Sibling {
    Sibling(double log_odds, int32_t candidate) : odds(log_odds), token(candidate) {}

    double odds;
    int32_t token;
};

// The end of a path through a tree; candidates and mentions lie in the tree's arrays.
struct End {
    Match own, stored[2];
    int32_t depth, cursor, agreed, context;
    int32_t first_mention, num_mentions, first_sibling, num_siblings;
};

struct TreeNode {
    int32_t token, parent, depth, end;  // end: -1 until the node is expanded
    double prob;
};

struct GrownTree {
    std::vector<TreeNode> nodes;  // as they came
    std::vector<End> ends;        // the root's first
    std::vector<Mention> mentions;
    std::vector<Sibling> siblings;

    void clear() {
        nodes.clear();
        ends.clear();
        mentions.clear();
        siblings.clear();
    }

    // The child of a node, or of the root, that is this token; -1: there is none.
    int32_t child(int32_t node, int32_t token) const {
        const int32_t size = static_cast<int32_t>(nodes.size());
        for (int32_t next = node + 1; next < size; next++)
            if (nodes[next].parent == node && nodes[next].token == token) return next;
        return -1;
    }

    // The candidate of this place by falling log-odds, of equals the higher token. Places are asked for in
    // turn, and few of them: each is found when it is asked for.
    const Sibling& sibling(const End& end, int32_t place) {
        Sibling* first = siblings.data() + end.first_sibling;
        Sibling *last = first + end.num_siblings, *best = first + place;
        for (Sibling* other = best + 1; other < last; other++)
            if (other->odds > best->odds || (other->odds == best->odds && other->token > best->token)) best = other;
        std::swap(first[place], *best);
        return first[place];
    }

    size_t nbytes() const {
        return nodes.capacity() * sizeof(TreeNode) + ends.capacity() * sizeof(End) +
               mentions.capacity() * sizeof(Mention) + siblings.capacity() * sizeof(Sibling);
    }
};

}  // namespace samewise::drafting
