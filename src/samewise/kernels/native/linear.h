// A product in strips, for kernels that cut it up themselves: the arithmetic of linear.cpp.

#pragma once

#include "calls.h"

namespace samewise {

constexpr int64_t STRIP = 48;  // outputs of one task: a multiple of PANEL and of a tile's outputs

inline int64_t num_strips(int64_t outputs) { return (outputs + STRIP - 1) / STRIP; }
inline int64_t whole_lanes(int64_t len) { return (len + 15) / 16 * 16; }

// Floats that `strip_sums` needs beside the sums, for weights that it unpacks: none for few rows, which are multiplied
// from the form that weights are kept in.
int64_t strip_room(const Weights& w, int64_t rows);

// The sums of outputs [strip * STRIP, ...) for all rows of x: sums[row][output], STRIP to a row. A row of x has
// `x_row` floats of which those from K up to `whole_lanes(K)` are zero.
void strip_sums(const Weights& w, const float* x, int64_t x_row, int64_t rows, int64_t strip, float* sums, float* room);

bool known_form(int64_t form);

}  // namespace samewise
