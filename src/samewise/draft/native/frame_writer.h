// The next frame's numbers, as pack.cpp reads them: spans, inputs, parents and moves, and the page tables.
//
// FrameWriter owns memory that is kept between calls, and nothing else. The frame is written to the caller's.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "interface.h"
#include "tree.h"
#include "verdicts.h"

namespace samewise::drafting {

constexpr int kSpanLen = 6;  // numbers of a span: see pack.cpp

class FrameWriter {
  public:
    // `trees`: with a count for every sequence of the frame.
    void write(const FrameToFollow& frame, const Verdicts& verdicts, const Trees& trees, NextFrame& next) {
        const int32_t *tokens = trees.tokens, *parents = trees.parents;
        const int32_t *pages = frame.pages, *known = frame.next_inputs;
        inputs_.clear();
        parents_.clear();
        int32_t *number = next.numbers, *page = next.pages;
        for (int64_t i = 0; i < frame.num; i++) {
            const FollowedSequence& followed = frame.sequences[i];
            const Verdict& verdict = verdicts[i];
            const int32_t num_pages = static_cast<int32_t>(followed.num_pages);
            const bool in_frame = followed.next_given ? followed.next_rows > 0 : !verdict.ended;
            if (followed.next_rows) {
                const int64_t start = followed.start + followed.num_rows;
                number = write_span(number, followed.next_rows, followed.next_given, start, num_pages, 0);
                inputs_.insert(inputs_.end(), known, known + followed.next_rows);
                known += followed.next_rows;
            } else if (in_frame) {
                const int32_t count = static_cast<int32_t>(trees.counts[i]);
                const bool chain = is_chain(parents, count);
                number = write_span(number, 1 + count, 1, verdict.length - 1, num_pages, chain ? 0 : count);
                inputs_.push_back(verdicts.tokens(verdict)[verdict.num_tokens - 1]);
                inputs_.insert(inputs_.end(), tokens, tokens + count);
                if (!chain) parents_.insert(parents_.end(), parents, parents + count);
                tokens += count;
                parents += count;
            }
            if (in_frame) page = std::copy(pages, pages + num_pages, page);
            pages += num_pages;
        }
        next.num_spans = (number - next.numbers) / kSpanLen;
        next.num_rows = static_cast<int64_t>(inputs_.size());
        next.num_pages = page - next.pages;
        number = std::copy(inputs_.begin(), inputs_.end(), number);
        number = std::copy(parents_.begin(), parents_.end(), number);
        int32_t* moved = write_moves(frame, verdicts, number);
        next.num_moves = (moved - number) / 2;
        next.num_numbers = moved - next.numbers;
    }

  private:
    static bool is_chain(const int32_t* parents, int32_t count) {
        for (int32_t node = 0; node < count; node++)
            if (parents[node] != node - 1) return false;
        return true;
    }

    static int32_t* write_span(int32_t* number, int64_t rows, int64_t given, int64_t start, int32_t num_pages,
                               int32_t num_parents) {
        const int32_t fields[kSpanLen] = {static_cast<int32_t>(rows),  static_cast<int32_t>(given),
                                          static_cast<int32_t>(start), -1,
                                          num_pages,                   num_parents};
        return std::copy(fields, fields + kSpanLen, number);
    }

    // Slots (from, to) of accepted guesses of trees that do not stand at their positions.
    static int32_t* write_moves(const FrameToFollow& frame, const Verdicts& verdicts, int32_t* moves) {
        const int32_t* pages = frame.pages;
        const int32_t page = static_cast<int32_t>(frame.page);
        for (int64_t i = 0; i < frame.num; i++) {
            const FollowedSequence& followed = frame.sequences[i];
            const Verdict& verdict = verdicts[i];
            const int32_t* rows = verdicts.path(verdict);
            const int32_t root = static_cast<int32_t>(followed.start + followed.given - 1);
            for (int32_t level = 1; level < verdict.num_rows && followed.num_parents; level++) {
                if (rows[level] == level) continue;
                for (const int32_t position : {root + rows[level], root + level})
                    *moves++ = pages[position / page] * page + position % page;
            }
            pages += followed.num_pages;
        }
        return moves;
    }

    std::vector<int32_t> inputs_, parents_;  // of all spans; parents of the trees that are no chains
};

}  // namespace samewise::drafting
