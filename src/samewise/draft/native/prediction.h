// A caller's prediction of a text, and where the text is in it. A sequence owns its own.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "interface.h"

namespace samewise::drafting {

struct Prediction {
    std::vector<int32_t> tokens;
    int32_t cursor = -1;  // the place that comes next; -1: unknown
    int32_t agreed = 0;   // tokens before it that agreed
    int32_t lost_at = 0;  // the place after the last token that agreed

    // Whether the prediction has a token at this place, which may be unknown.
    bool reaches(int32_t place) const { return place >= 0 && place < static_cast<int64_t>(tokens.size()); }
    bool says(int32_t place, int32_t token) const { return reaches(place) && tokens[place] == token; }

    // Move the place after new tokens of the text, which begins at `start` of `text` and ends with them. Where the
    // text left the prediction, look for its last tokens in it.
    void follow(const int32_t* added, int64_t num, const std::vector<int32_t>& text, size_t start,
                const DrafterTuning& tuning) {
        if (tokens.empty()) return;
        for (int64_t i = 0; i < num; i++) {
            if (says(cursor, added[i])) {
                lost_at = ++cursor;
                agreed++;
            } else {
                cursor = -1;
                agreed = 0;
            }
        }
        if (cursor < 0) resync(text, start, tuning);
    }

  private:
    // The most agreeing tokens win; of equals the first place after `lost_at`, then the first before it.
    void resync(const std::vector<int32_t>& text, size_t start, const DrafterTuning& tuning) {
        const int64_t num_last = std::min<int64_t>(tuning.max_length, static_cast<int64_t>(text.size() - start));
        int64_t best = 0, best_end = 0;
        bool best_after = false;
        for (int64_t end = 1; end < static_cast<int64_t>(tokens.size()); end++) {
            if (tokens[end - 1] != text.back()) continue;
            int64_t num = 1;
            const int64_t most = std::min(end, num_last);
            while (num < most && tokens[end - 1 - num] == text[text.size() - 1 - num]) num++;
            const bool after = end > lost_at;
            if (num > best || (num == best && after && !best_after)) {
                best = num;
                best_after = after;
                best_end = end;
            }
        }
        if (best < tuning.min_resync) return;
        cursor = static_cast<int32_t>(best_end);
        agreed = static_cast<int32_t>(best);
    }
};

}  // namespace samewise::drafting
