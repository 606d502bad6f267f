// Trees for many sequences, of the nodes that bring most tokens per second. tree.py's grow() in C++.
//
// TreeGrower owns the heap and the list of sequences that grow at the next call; the trees are the sequences' own.

#pragma once

#include <algorithm>
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
    Waiting(double priority_, int64_t serial_, double above_, int32_t sequence_, int32_t node_, int32_t end_,
            int32_t place_)
        : priority(priority_),
          serial(serial_),
          above(above_),
          sequence(sequence_),
          node(node_),
          end(end_),
          place(place_) {}

    double priority;  // minus the probability, or minus a share of it
    int64_t serial;
    double above;  // the parent's probability, or the node's
    int32_t sequence, node, end, place;
};

struct Later {
    bool operator()(const Waiting& a, const Waiting& b) const {
        return a.priority != b.priority ? a.priority > b.priority : a.serial > b.serial;
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
        const auto [live, seconds, budget, min_prob] = prices;
        push_roots(min_prob);
        int64_t serial = static_cast<int64_t>(growing_.size());
        int64_t num_nodes = 0;
        double expected = 0.0, best = live / seconds[0];
        while (!heap_.empty() && num_nodes < budget) {
            if (num_nodes % tuning_.check_nodes == 0 &&
                !can_pay(prices, num_nodes, expected, -heap_.front().priority, best))
                break;
            Waiting entry = pop();
            Sequence& sequence = *growing_[entry.sequence];
            GrownTree& tree = sequence.tree;
            if (static_cast<int64_t>(tree.nodes.size()) >= sequence.limit.max_nodes) continue;
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
                    push(tuning_.patience * entry.priority, serial - 1, -entry.priority, entry.sequence,
                         static_cast<int32_t>(tree.nodes.size()), entry.end, -1);
                tree.nodes.push_back({token, entry.node, depth, -1, -entry.priority});
                num_nodes++;
                expected += -entry.priority;
                best = std::max(best, (live + expected) / seconds[num_nodes]);
                entry.place++;
            }
            const End& end = tree.ends[entry.end];
            if (entry.place < end.num_siblings) {
                const double prob = entry.above * chance(tree.sibling(end, entry.place).odds);
                if (prob >= min_prob)
                    push(-prob, serial, entry.above, entry.sequence, entry.node, entry.end, entry.place);
            }
        }
        return cutter_.cut(growing_, prices, trees);
    }

  private:
    // The likeliest first child of each tree. Serial numbers are the sequences' own, also where there is none.
    void push_roots(double min_prob) {
        heap_.clear();
        for (size_t i = 0; i < growing_.size(); i++) {
            Sequence& sequence = *growing_[i];
            candidates_.set_root(sequence);
            const End& root = sequence.tree.ends[0];
            if (sequence.limit.max_depth <= 0 || !root.num_siblings) continue;
            const double prob = chance(sequence.tree.sibling(root, 0).odds);
            if (prob >= min_prob)
                push(-prob, static_cast<int64_t>(i), 1.0, static_cast<int32_t>(i), kRoot, 0, 0);
        }
    }

    // Whether more nodes of this probability, after `num`, could bring more tokens per second than `best`.
    static bool can_pay(const Prices& prices, int64_t num, double expected, double prob, double best) {
        double reached = prices.live + expected;
        for (int64_t i = num + 1; i <= prices.budget; i++) {
            reached += prob;
            if (reached > best * prices.seconds[i]) return true;
        }
        return false;
    }

    template <typename... Fields>
    void push(Fields... fields) {  // of a Waiting
        heap_.emplace_back(fields...);
        std::push_heap(heap_.begin(), heap_.end(), Later());
    }

    Waiting pop() {
        std::pop_heap(heap_.begin(), heap_.end(), Later());
        const Waiting entry = heap_.back();
        heap_.pop_back();
        return entry;
    }

    const DrafterTuning& tuning_;
    const Candidates& candidates_;
    std::vector<Waiting> heap_;
    std::vector<Sequence*> growing_;
    TreeCutter cutter_;
};

}  // namespace samewise::drafting
