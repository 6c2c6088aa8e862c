// Tiles in fp32, for every type.

#pragma once

#include "tile.h"

namespace {

// In fp32, for every type. Tokens are in the lanes of the scores, dimensions in those of the sums.
template <class T> struct FloatTile {
  using Type = T;

  static int64_t position(int64_t d) { return d; }
  static void configure(int) {}
  static void finish() {}

  static void lay_out_queries(const T* q, int num_vectors, int head_dim, uint8_t* laid_out) {
    float* to = reinterpret_cast<float*>(laid_out);
    for (int i = 0; i < num_vectors * head_dim; i += W) store_vector(to + i, load(q + i));
  }

  static void score(const uint8_t* queries, const T* k, int64_t stride, int num_vectors, int num_tokens, int head_dim,
                    Scratch& s) {
    float* keys = reinterpret_cast<float*>(s.keys);  // [D][TILE]
    for (int n = 0; n < num_tokens; n += W)
      for (int d = 0; d < head_dim; d += W) {
        Words rows[W];
        load_rows(rows, num_tokens - n, [&](int i) { return bits_of<Words>(load(k + (n + i) * stride + d)); });
        transpose(rows);
        for (int i = 0; i < W; ++i) store_vector(keys + (d + i) * TILE + n, rows[i]);
      }
    const float* q = reinterpret_cast<const float*>(queries);
    for_row_blocks(num_vectors, [&](int r, auto rows) {
      score_rows<rows>(q + r * head_dim, keys, num_tokens, head_dim, s.scores + r);
    });
  }

  template <int ROWS>
  static void score_rows(const float* q, const float* keys, int num_tokens, int head_dim, float (*scores)[TILE]) {
    constexpr int COLUMNS = columns_for(ROWS);
    for (int n = 0; n < num_tokens; n += COLUMNS * W) {
      Floats sums[ROWS][COLUMNS] = {};
      for (int d = 0; d < head_dim; ++d)
        for (int c = 0; c < COLUMNS; ++c) {
          const Floats key = load(keys + d * TILE + n + c * W);
          for (int r = 0; r < ROWS; ++r) sums[r][c] += q[r * head_dim + d] * key;
        }
      for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < COLUMNS; ++c) store_vector(&scores[r][n + c * W], sums[r][c]);
    }
  }

  static Floats set_weights(int r, int n, Floats weights, Scratch& s) {
    store_vector(reinterpret_cast<float*>(s.weights) + r * TILE + n, weights);
    return weights;
  }

  static void accumulate(const T* v, int64_t stride, int num_vectors, int num_tokens, int head_dim, float* acc,
                         Scratch& s) {
    const float* weights = reinterpret_cast<const float*>(s.weights);
    for_row_blocks(num_vectors, [&](int r, auto rows) {
      accumulate_rows<rows>(v, stride, weights + r * TILE, num_tokens, head_dim, acc + r * head_dim);
    });
  }

  template <int ROWS>
  static void accumulate_rows(const T* v, int64_t stride, const float* weights, int num_tokens, int head_dim,
                              float* acc) {
    constexpr int COLUMNS = columns_for(ROWS);
    int d = 0;
    for (; d + COLUMNS * W <= head_dim; d += COLUMNS * W)
      accumulate_columns<ROWS, COLUMNS>(v + d, stride, weights, num_tokens, head_dim, acc + d);
    for (; d < head_dim; d += W)
      accumulate_columns<ROWS, 1>(v + d, stride, weights, num_tokens, head_dim, acc + d);
  }

  template <int ROWS, int COLUMNS>
  static void accumulate_columns(const T* v, int64_t stride, const float* weights, int num_tokens, int head_dim,
                                 float* acc) {
    Floats sums[ROWS][COLUMNS];
    for (int r = 0; r < ROWS; ++r)
      for (int c = 0; c < COLUMNS; ++c) sums[r][c] = load(acc + r * head_dim + c * W);
    for (int n = 0; n < num_tokens; ++n) {
      prefetch_following<COLUMNS * W * sizeof(T)>(v + n * stride);
      for (int c = 0; c < COLUMNS; ++c) {
        const Floats value = load(v + n * stride + c * W);
        for (int r = 0; r < ROWS; ++r) sums[r][c] += weights[r * TILE + n] * value;
      }
    }
    for (int r = 0; r < ROWS; ++r)
      for (int c = 0; c < COLUMNS; ++c) store_vector(acc + r * head_dim + c * W, sums[r][c]);
  }
};

}  // namespace
