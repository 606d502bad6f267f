// Which nodes of the grown trees are worth their price, and the trees that are left. tree.py's cut() and
// GrownTree.depth_first() in C++.
//
// TreeCutter owns memory that is kept between calls, and nothing else: no call depends on the one before.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "sequences.h"
#include "tree.h"

namespace samewise::drafting {

class TreeCutter {
  public:
    // Write the nodes of all trees that bring most in logarithms of tokens per second. Returns their number.
    // `costs`: by number of nodes, in such logarithms.
    int64_t cut(const std::vector<Sequence*>& grown, double own, const std::vector<double>& costs, const Trees& trees) {
        sort_nodes(grown, own);
        double best = 0.0, gain = 0.0, expected = 0.0;
        size_t num = 0;
        *trees.brought = 0.0;
        for (size_t i = 0; i < nodes_.size(); i++) {
            gain += std::log1p(nodes_[i].share);
            expected += nodes_[i].prob;
            if (gain - costs[i + 1] > best) {
                best = gain - costs[i + 1];
                num = i + 1;
                *trees.brought = expected;
            }
        }
        std::fill(trees.counts, trees.counts + grown.size(), 0);
        for (size_t i = 0; i < num; i++) trees.counts[nodes_[i].tree]++;
        int64_t written = 0;
        for (size_t i = 0; i < grown.size(); i++) {
            const int64_t kept = trees.counts[i];
            if (kept)
                trees.counts[i] = write(grown[i]->tree, kept, grown[i]->limit, trees.tokens + written,
                                        trees.parents + written, trees.probs + written);
            written += trees.counts[i];
        }
        return written;
    }

  private:
    struct Candidate {
        double share, prob;  // the probability over the tokens expected without this node, and itself
        int32_t tree;
    };

    // All nodes by falling share, of equals those of earlier trees.
    void sort_nodes(const std::vector<Sequence*>& grown, double own) {
        nodes_.clear();
        for (size_t i = 0; i < grown.size(); i++) {
            probs_.clear();
            for (const TreeNode& node : grown[i]->tree.nodes) probs_.push_back(node.prob);
            std::sort(probs_.begin(), probs_.end(), std::greater<double>());
            double tokens = own;
            for (const double prob : probs_) {
                nodes_.push_back({prob / tokens, prob, static_cast<int32_t>(i)});
                tokens += prob;
            }
        }
        std::stable_sort(nodes_.begin(), nodes_.end(),
                         [](const Candidate& a, const Candidate& b) { return a.share > b.share; });
    }

    // The `kept` most probable nodes, depth first, the likeliest child first, but none after a stop id. Returns
    // their number.
    int32_t write(const GrownTree& tree, int64_t kept, const Limit& limit, int32_t* tokens, int32_t* parents,
                  double* probs) {
        const std::vector<TreeNode>& nodes = tree.nodes;
        link(nodes, kept);
        place_.assign(nodes.size() + 1, kRoot);
        stack_.clear();
        if (first_child_[0] >= 0) stack_.push_back(first_child_[0]);
        int32_t written = 0;
        while (!stack_.empty()) {
            const int32_t node = stack_.back();
            stack_.pop_back();
            tokens[written] = nodes[node].token;
            parents[written] = place_[nodes[node].parent + 1];
            probs[written] = nodes[node].prob;
            place_[node + 1] = written++;
            if (next_sibling_[node] >= 0) stack_.push_back(next_sibling_[node]);
            if (first_child_[node + 1] >= 0 && !limit.stops_at(nodes[node].token))
                stack_.push_back(first_child_[node + 1]);
        }
        return written;
    }

    // Lists of the kept children by node, the root's at 0; the least likely is linked first and ends up last.
    void link(const std::vector<TreeNode>& nodes, int64_t kept) {
        const int32_t size = static_cast<int32_t>(nodes.size());
        sorted_.resize(size);
        for (int32_t i = 0; i < size; i++) sorted_[i] = i;
        std::stable_sort(sorted_.begin(), sorted_.end(),
                         [&](int32_t a, int32_t b) { return nodes[a].prob > nodes[b].prob; });
        first_child_.assign(size + 1, -1);
        next_sibling_.assign(size, -1);
        for (int64_t i = kept - 1; i >= 0; i--) {
            const int32_t node = sorted_[i], parent = nodes[node].parent + 1;
            next_sibling_[node] = first_child_[parent];
            first_child_[parent] = node;
        }
    }

    std::vector<Candidate> nodes_;  // of all trees
    std::vector<double> probs_;     // of one tree
    std::vector<int32_t> sorted_, first_child_, next_sibling_, place_, stack_;
};

}  // namespace samewise::drafting
