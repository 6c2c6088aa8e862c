// Tiles in bf16 with AVX-512: products of pairs.

#pragma once

#include "tile.h"

#if defined(__AVX512BF16__)

namespace {

// The weights, rounded to bf16, as the products see them.
inline Floats set_bfloat16_weights(int r, int n, Floats weights, Scratch& s) {
  Bfloat16* to = reinterpret_cast<Bfloat16*>(s.weights) + r * TILE + n;
  store_vector(to, _mm512_cvtneps_pbh(bits_of<__m512>(weights)));
  return load(to);
}

// With products of pairs of bf16 that are summed in fp32 (vdpbf16ps).
struct PairTile {
  using Type = Bfloat16;

  // Interleaving the values of two tokens leaves the dimensions in this order.
  static int64_t position(int64_t d) { return d / 32 * 32 + d % 8 / 4 * 16 + d % 32 / 8 * 4 + d % 4; }
  static void configure(int) {}
  static void finish() {}

  static void lay_out_queries(const Bfloat16* q, int num_vectors, int head_dim, uint8_t* laid_out) {
    std::memcpy(laid_out, q, size_t(num_vectors) * head_dim * sizeof(Bfloat16));
  }

  static void score(const uint8_t* queries, const Bfloat16* k, int64_t stride, int num_vectors, int num_tokens,
                    int head_dim, Scratch& s) {
    const int num_pairs = head_dim / 2;
    uint32_t* keys = reinterpret_cast<uint32_t*>(s.keys);  // pairs of dimensions, [D / 2][TILE]
    for (int n = 0; n < num_tokens; n += W)
      for (int d = 0; d < num_pairs; d += W) {
        Words rows[W];
        load_rows(rows, num_tokens - n, [&](int i) { return load_vector<Words>(k + (n + i) * stride + 2 * d); });
        transpose(rows);
        for (int i = 0; i < W; ++i) store_vector(keys + (d + i) * TILE + n, rows[i]);
      }
    const uint32_t* q = reinterpret_cast<const uint32_t*>(queries);
    for_row_blocks(num_vectors, [&](int r, auto rows) {
      score_rows<rows>(q + r * num_pairs, keys, num_tokens, num_pairs, s.scores + r);
    });
  }

  template <int ROWS>
  static void score_rows(const uint32_t* q, const uint32_t* keys, int num_tokens, int num_pairs,
                         float (*scores)[TILE]) {
    constexpr int COLUMNS = columns_for(ROWS);
    for (int n = 0; n < num_tokens; n += COLUMNS * W) {
      __m512 sums[ROWS][COLUMNS] = {};
      for (int d = 0; d < num_pairs; ++d)
        for (int c = 0; c < COLUMNS; ++c) {
          const auto key = bits_of<__m512bh>(load_vector<Words>(keys + d * TILE + n + c * W));
          for (int r = 0; r < ROWS; ++r)
            sums[r][c] = _mm512_dpbf16_ps(sums[r][c], key, bits_of<__m512bh>(_mm512_set1_epi32(q[r * num_pairs + d])));
        }
      for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < COLUMNS; ++c) store_vector(&scores[r][n + c * W], sums[r][c]);
    }
  }

  static Floats set_weights(int r, int n, Floats weights, Scratch& s) { return set_bfloat16_weights(r, n, weights, s); }

  static void accumulate(const Bfloat16* v, int64_t stride, int num_vectors, int num_tokens, int head_dim, float* acc,
                         Scratch& s) {
    const uint32_t* weights = reinterpret_cast<const uint32_t*>(s.weights);  // pairs of tokens, [R][TILE / 2]
    for_row_blocks(num_vectors, [&](int r, auto rows) {
      accumulate_rows<rows>(v, stride, weights + r * (TILE / 2), num_tokens, head_dim, acc + r * head_dim);
    });
  }

  template <int ROWS>
  static void accumulate_rows(const Bfloat16* v, int64_t stride, const uint32_t* weights, int num_tokens, int head_dim,
                              float* acc) {
    int d = 0;
    if constexpr (columns_for(ROWS) == 4)
      for (; d + 4 * W <= head_dim; d += 4 * W)
        accumulate_columns<ROWS, 4>(v + d, stride, weights, num_tokens, head_dim, acc + d);
    for (; d < head_dim; d += 2 * W)
      accumulate_columns<ROWS, 2>(v + d, stride, weights, num_tokens, head_dim, acc + d);
  }

  template <int ROWS, int COLUMNS>
  static void accumulate_columns(const Bfloat16* v, int64_t stride, const uint32_t* weights, int num_tokens,
                                 int head_dim, float* acc) {
    __m512 sums[ROWS][COLUMNS];
    for (int r = 0; r < ROWS; ++r)
      for (int c = 0; c < COLUMNS; ++c) sums[r][c] = load_vector<__m512>(acc + r * head_dim + c * W);
    for (int n = 0; n < num_tokens; n += 2) {
      const Bfloat16* even = v + n * stride;
      prefetch_following<COLUMNS * W * sizeof(Bfloat16)>(even);
      prefetch_following<COLUMNS * W * sizeof(Bfloat16)>(even + stride);
      __m512bh values[COLUMNS];  // 16 pairs of two tokens' values, in the order of position()
      for (int c = 0; c < COLUMNS; c += 2) {
        const auto first = load_vector<__m512i>(even + c * W);
        const auto second = n + 1 < num_tokens ? load_vector<__m512i>(even + stride + c * W) : __m512i{};
        values[c] = bits_of<__m512bh>(_mm512_unpacklo_epi16(first, second));
        values[c + 1] = bits_of<__m512bh>(_mm512_unpackhi_epi16(first, second));
      }
      for (int r = 0; r < ROWS; ++r) {
        const auto pair = bits_of<__m512bh>(_mm512_set1_epi32(weights[r * (TILE / 2) + n / 2]));
        for (int c = 0; c < COLUMNS; ++c) sums[r][c] = _mm512_dpbf16_ps(sums[r][c], pair, values[c]);
      }
    }
    for (int r = 0; r < ROWS; ++r)
      for (int c = 0; c < COLUMNS; ++c) store_vector(acc + r * head_dim + c * W, sums[r][c]);
  }
};

}  // namespace
#endif
