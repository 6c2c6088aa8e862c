// What the three kinds of tile share. Legend: see attention.cpp.
//
// Three classes compute the same: scores[r][n] = q[r] . k[n], later acc[r] += sum over n of weights[r][n] v[n]. `k` and
// `v` are the tile's first token of one kv head, and the next token is `stride` elements further. R <= MAX_VECTORS.
// Each class lays out the queries, once for a chunk, and the weights as its products need them.

#pragma once

#include "vectors.h"

namespace {

struct Scratch {
  alignas(64) float scores[MAX_VECTORS][TILE];
  alignas(64) uint8_t weights[2 * MAX_VECTORS * TILE * sizeof(float)];
  alignas(64) uint8_t keys[TILE * MAX_HEAD_DIM * sizeof(float)];
};

constexpr int QUERY_BYTES = MAX_VECTORS * MAX_HEAD_DIM * sizeof(float);  // of one kv head's laid out queries

}  // namespace
