// How likely a candidate is the next token, learned from verified frames. estimates.py in C++.
//
// Estimates owns the weights and the sums of squared errors, which all sequences share. Doubles are added in the
// order of the reference, so that both come to the same trees.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "interface.h"
#include "token_set.h"
#include "tree.h"

namespace samewise::drafting {

inline double chance(double log_odds) { return log_odds > -30.0 ? 1.0 / (1.0 + std::exp(-log_odds)) : 0.0; }

class Estimates {
  public:
    Estimates(const DrafterTuning& tuning, const double* first_weights)
        : tuning_(tuning),
          weights_(first_weights, first_weights + 2 * tuning.again),
          squares_(2 * tuning.again, tuning.first_squares) {}

    const double* weights() const { return weights_.data(); }

    // The class of a context: the lengths of its matches, and whether its last token has recycled candidates.
    int32_t context_class(int64_t own_length, int64_t stored_length, bool recycled) const {
        const int64_t most = tuning_.max_length;
        const int64_t own = std::min(own_length, most), stored = std::min(stored_length, most);
        return static_cast<int32_t>((own * (most + 1) + stored) * 2 + recycled);
    }

    // Append an end's candidates, one for each token that is mentioned. `seen`: the tokens of the own text.
    void rank(GrownTree& tree, End& end, const TokenSet& seen) const {
        const Mention* mentions = tree.mentions.data() + end.first_mention;
        std::vector<Sibling>& siblings = tree.siblings;
        const size_t first = siblings.size();
        const double base = weights_[end.context];
        for (int32_t i = 0; i < end.num_mentions; i++) {
            size_t j = first;
            while (j < siblings.size() && siblings[j].token != mentions[i].token) j++;
            if (j == siblings.size())
                siblings.emplace_back(base + weights_[mentions[i].index], mentions[i].token);
            else
                siblings[j].odds += weights_[mentions[i].index + tuning_.again];
        }
        const double more = weights_[tuning_.occurred];
        for (size_t j = first; j < siblings.size(); j++)
            if (seen.has(siblings[j].token)) siblings[j].odds += more;
        end.first_sibling = static_cast<int32_t>(first);
        end.num_siblings = static_cast<int32_t>(siblings.size() - first);
    }

    // Move the weights of each candidate of an end towards what came: `truth` was the next token.
    void learn(const GrownTree& tree, const End& end, const TokenSet& seen, int32_t truth) {
        const Mention* mentions = tree.mentions.data() + end.first_mention;
        for (int32_t i = 0; i < end.num_mentions; i++) {
            const int32_t token = mentions[i].token;
            bool earlier = false;
            for (int32_t j = 0; j < i && !earlier; j++) earlier = mentions[j].token == token;
            if (earlier) continue;
            int32_t indices[64], num = 0;
            indices[num++] = end.context;
            indices[num++] = mentions[i].index;
            for (int32_t j = i + 1; j < end.num_mentions && num < 63; j++)
                if (mentions[j].token == token)
                    indices[num++] = mentions[j].index + static_cast<int32_t>(tuning_.again);
            if (seen.has(token)) indices[num++] = static_cast<int32_t>(tuning_.occurred);
            move(indices, num, token == truth);
        }
    }

  private:
    // One step of Adagrad for the weights of one candidate.
    void move(const int32_t* indices, int32_t num, bool came) {
        double odds = 0.0;
        for (int32_t j = 0; j < num; j++) odds += weights_[indices[j]];
        const double error = (came ? 1.0 : 0.0) - chance(odds);
        for (int32_t j = 0; j < num; j++) {
            double& total = squares_[indices[j]];
            total = std::min(total + error * error, tuning_.max_squares);
            weights_[indices[j]] += tuning_.step * error / std::sqrt(total);
        }
    }

    const DrafterTuning& tuning_;
    std::vector<double> weights_, squares_;
};

}  // namespace samewise::drafting
