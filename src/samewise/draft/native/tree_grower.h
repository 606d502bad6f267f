// Trees for many sequences, of the nodes that bring most in logarithms of tokens per second. tree.py's grow() in
// C++.
//
// TreeGrower owns the heaps and the list of sequences that grow at the next call; the trees are the sequences' own.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "candidates.h"
#include "estimates.h"
#include "interface.h"
#include "sequences.h"
#include "tree.h"
#include "tree_cutter.h"

namespace samewise::drafting {

// A child to add (place >= 0), or a node to expand (place < 0). Constructed in place, as a Mention is.
struct Waiting {
    Waiting(double priority_, int64_t serial_, double above_, int32_t node_, int32_t end_, int32_t place_)
        : priority(priority_), serial(serial_), above(above_), node(node_), end(end_), place(place_) {}

    double priority;  // minus the probability, or minus a share of it
    int64_t serial;
    double above;  // the parent's probability, or the node's
    int32_t node, end, place;
};

// A tree that can grow: minus the share of what is first in its heap.
struct Next {
    Next(double priority_, int32_t tree_) : priority(priority_), tree(tree_) {}

    double priority;
    int32_t tree;
};

struct Later {
    bool operator()(const Waiting& a, const Waiting& b) const {
        return a.priority != b.priority ? a.priority > b.priority : a.serial > b.serial;
    }
    bool operator()(const Next& a, const Next& b) const {
        return a.priority != b.priority ? a.priority > b.priority : a.tree > b.tree;
    }
};

class TreeGrower {
  public:
    TreeGrower(const DrafterTuning& tuning, const Candidates& candidates) : tuning_(tuning), candidates_(candidates) {}

    void clear() { growing_.clear(); }

    // Let a sequence grow a tree at the next call of grow().
    void add(Sequence& sequence, const Limit& limit) {
        sequence.limit = limit;
        growing_.push_back(&sequence);
    }

    size_t num_growing() const { return growing_.size(); }

    // Grow and write a tree for each sequence that was added. Returns the number of nodes.
    int64_t grow(const Prices& prices, const Trees& trees) {
        set_costs(prices);
        push_roots(prices);
        int64_t serial = static_cast<int64_t>(growing_.size());
        int64_t num_nodes = 0;
        double gain = 0.0, best = 0.0;
        while (!nexts_.empty() && num_nodes < prices.budget) {
            if (num_nodes % tuning_.check_nodes == 0 && !can_pay(num_nodes, gain, -nexts_.front().priority, best))
                break;
            const int32_t i = pop(nexts_).tree;
            Sequence& sequence = *growing_[i];
            std::vector<Waiting>& heap = heaps_[i];
            GrownTree& tree = sequence.tree;
            if (static_cast<int64_t>(tree.nodes.size()) >= sequence.limit.max_nodes) continue;
            Waiting entry = pop(heap);
            serial += 2;
            if (entry.place < 0) {
                TreeNode& node = tree.nodes[entry.node];
                node.end = candidates_.expand(sequence, entry.end, node.token);
                entry.end = node.end;
                entry.place = 0;
            } else {
                const int32_t token = tree.siblings[tree.ends[entry.end].first_sibling + entry.place].token;
                const int32_t depth = 1 + (entry.node >= 0 ? tree.nodes[entry.node].depth : 0);
                if (depth < sequence.limit.max_depth)
                    push(heap, tuning_.patience * entry.priority, serial - 1, -entry.priority,
                         static_cast<int32_t>(tree.nodes.size()), entry.end, -1);
                tree.nodes.push_back({token, entry.node, depth, -1, -entry.priority});
                num_nodes++;
                gain += std::log1p(-entry.priority / tokens_[i]);
                tokens_[i] += -entry.priority;
                best = std::max(best, gain - costs_[num_nodes]);
                entry.place++;
            }
            const End& end = tree.ends[entry.end];
            if (entry.place < end.num_siblings) {
                const double prob = entry.above * chance(tree.sibling(end, entry.place).odds);
                if (prob >= prices.min_prob)
                    push(heap, -prob, serial, entry.above, entry.node, entry.end, entry.place);
            }
            if (!heap.empty()) push(nexts_, heap.front().priority / tokens_[i], i);
        }
        return cutter_.cut(growing_, prices.own, costs_, trees);
    }

  private:
    // Of frames with 0 nodes and more: what all sequences lose by them, in logarithms of their pace.
    void set_costs(const Prices& prices) {
        const double first = prices.seconds[0] + prices.gap;
        double last = prices.seconds[0], cost = 0.0;
        costs_.clear();
        for (int64_t i = 0; i <= prices.budget; i++) {
            if (prices.seconds[i] != last) {  // most are equal, where rows are padded
                last = prices.seconds[i];
                cost = static_cast<double>(prices.live) * std::log((last + prices.gap) / first);
            }
            costs_.push_back(cost);
        }
    }

    // The likeliest first child of each tree. Serial numbers are the sequences' own, also where there is none.
    void push_roots(const Prices& prices) {
        nexts_.clear();
        tokens_.assign(growing_.size(), prices.own);
        if (heaps_.size() < growing_.size()) heaps_.resize(growing_.size());
        for (size_t i = 0; i < growing_.size(); i++) {
            Sequence& sequence = *growing_[i];
            heaps_[i].clear();
            candidates_.set_root(sequence);
            const End& root = sequence.tree.ends[0];
            if (sequence.limit.max_depth <= 0 || !root.num_siblings) continue;
            const double prob = chance(sequence.tree.sibling(root, 0).odds);
            if (prob < prices.min_prob) continue;
            push(heaps_[i], -prob, static_cast<int64_t>(i), 1.0, kRoot, 0, 0);
            push(nexts_, -prob / prices.own, static_cast<int32_t>(i));
        }
    }

    // Whether nodes of at most this share, after `num` that gained so much, could bring more than `best`.
    bool can_pay(int64_t num, double gain, double share, double best) const {
        const double num_trees = static_cast<double>(growing_.size());
        const int64_t last = static_cast<int64_t>(costs_.size()) - 1;
        for (int64_t i = num + 1; i <= last; i++)
            if ((i == last || costs_[i + 1] != costs_[i]) &&
                gain + num_trees * std::log1p(static_cast<double>(i - num) * share / num_trees) > best + costs_[i])
                return true;
        return false;
    }

    template <typename Entry, typename... Fields>
    static void push(std::vector<Entry>& heap, Fields... fields) {  // of an Entry
        heap.emplace_back(fields...);
        std::push_heap(heap.begin(), heap.end(), Later());
    }

    template <typename Entry>
    static Entry pop(std::vector<Entry>& heap) {
        std::pop_heap(heap.begin(), heap.end(), Later());
        const Entry entry = heap.back();
        heap.pop_back();
        return entry;
    }

    const DrafterTuning& tuning_;
    const Candidates& candidates_;
    std::vector<Sequence*> growing_;
    std::vector<std::vector<Waiting>> heaps_;  // of each of them
    std::vector<Next> nexts_;
    std::vector<double> tokens_;  // expected of each of them
    std::vector<double> costs_;   // by number of nodes
    TreeCutter cutter_;
};

}  // namespace samewise::drafting
