// Three kinds of tile, for the instruction sets and types. Legend: see attention.cpp.
//
// All compute the same: scores[r][n] = q[r] . k[n], later acc[r] += sum over n of weights[r][n] v[n]. `k` and
// `v` are the tile's first token of one kv head, and the next token is `stride` elements further. R <= MAX_VECTORS.
// Each lays out the queries, once for a chunk, and the weights as its products need them.

#pragma once

#include "vectors.h"

namespace {

struct Scratch {
  alignas(64) float scores[MAX_VECTORS][TILE];
  alignas(64) uint8_t weights[2 * MAX_VECTORS * TILE * sizeof(float)];
  alignas(64) uint8_t keys[TILE * MAX_HEAD_DIM * sizeof(float)];
};

constexpr int QUERY_BYTES = MAX_VECTORS * MAX_HEAD_DIM * sizeof(float);  // of one kv head's laid out queries

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

#if defined(__AVX512BF16__)

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

#endif

#if defined(__AMX_BF16__)

// With the matrix unit: products of 16 x 32 by 32 x 16, in bf16, summed in fp32. Keys and values are read where they
// lie. A product pairs neighbouring elements of a row. For scores these are dimensions, as it should be. For sums they
// should be tokens, but values lie with neighbouring dimensions together. So each weight comes once paired with 0 before
// it and once with 0 after it, which gives the even and the odd dimensions apart. Interleaving the values would take
// longer.
struct MatrixTile {
  using Type = Bfloat16;
  static constexpr int ROW_BYTES = 64;  // of every tile register

  static int64_t position(int64_t d) { return d / 32 * 32 + d % 2 * 16 + d % 32 / 2; }

  static void configure(int num_vectors) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 8; ++tile) {
      config.row_bytes[tile] = ROW_BYTES;
      // 0 to 3: sums, 4: weights, 5 to 7: keys, queries, scores
      config.rows[tile] = tile <= 4 ? uint8_t(num_vectors) : 16;
    }
    _tile_loadconfig(&config);
  }

  static void finish() { _tile_release(); }

  static void lay_out_queries(const Bfloat16* q, int num_vectors, int head_dim, uint8_t* laid_out) {
    for (int d = 0; d < head_dim / 2; d += W) {  // [D / 2][16] pairs
      Words rows[W];
      for (int r = 0; r < W; ++r) rows[r] = r < num_vectors ? load_vector<Words>(q + r * head_dim + 2 * d) : Words{};
      transpose(rows);
      for (int i = 0; i < W; ++i) store_vector(laid_out + (d + i) * ROW_BYTES, rows[i]);
    }
  }

  // 16 tokens as they lie, or a copy if there are fewer: what follows the last one may not be ours to read.
  struct Rows {
    const Bfloat16* base;
    int64_t stride;

    Rows(const Bfloat16* from, int64_t from_stride, int num_tokens, int head_dim, uint8_t* copy)
        : base(from), stride(from_stride) {
      if (num_tokens >= 16) return;
      base = reinterpret_cast<Bfloat16*>(copy);
      stride = head_dim;
      std::memset(copy, 0, 16 * head_dim * sizeof(Bfloat16));
      for (int i = 0; i < num_tokens; ++i)
        std::memcpy(copy + i * head_dim * sizeof(Bfloat16), from + i * from_stride, head_dim * sizeof(Bfloat16));
    }
  };

  static void score(const uint8_t* queries, const Bfloat16* k, int64_t stride, int num_vectors, int num_tokens,
                    int head_dim, Scratch& s) {
    for (int n = 0; n < num_tokens; n += 16) {
      const Rows keys(k + n * stride, stride, num_tokens - n, head_dim, s.keys);
      _tile_zero(7);
      for (int d = 0; d < head_dim; d += 32) {
        _tile_loadd(5, keys.base + d, keys.stride * 2);
        _tile_loadd(6, queries + d / 2 * ROW_BYTES, ROW_BYTES);
        _tile_dpbf16ps(7, 5, 6);
      }
      alignas(64) float sums[16][16];  // [token][vector]
      _tile_stored(7, sums, ROW_BYTES);
      Words rows[W];
      for (int i = 0; i < W; ++i) rows[i] = load_vector<Words>(sums[i]);
      transpose(rows);
      for (int r = 0; r < num_vectors; ++r) store_vector(&s.scores[r][n], rows[r]);
    }
  }

  static Floats set_weights(int r, int n, Floats weights, Scratch& s) {
    const Halves rounded = bits_of<Halves>(_mm512_cvtneps_pbh(bits_of<__m512>(weights)));
    const Words words = __builtin_convertvector(rounded, Words);
    uint32_t* even = reinterpret_cast<uint32_t*>(s.weights);
    uint32_t* odd = even + MAX_VECTORS * TILE;
    store_vector(even + r * TILE + n, words);
    store_vector(odd + r * TILE + n, words << 16);
    return bits_of<Floats>(words << 16);
  }

  static void accumulate(const Bfloat16* v, int64_t stride, int num_vectors, int num_tokens, int head_dim, float* acc,
                         Scratch& s) {
    int d = 0;
    for (; d + 64 <= head_dim; d += 64) accumulate_columns<true>(v, stride, num_tokens, head_dim, d, acc, s);
    if (d < head_dim) accumulate_columns<false>(v, stride, num_tokens, head_dim, d, acc, s);
  }

  // 64 dimensions from `d` on, or the last 32.
  template <bool BOTH>
  static void accumulate_columns(const Bfloat16* v, int64_t stride, int num_tokens, int head_dim, int d, float* acc,
                                 Scratch& s) {
    const uint32_t* even = reinterpret_cast<const uint32_t*>(s.weights);
    const uint32_t* odd = even + MAX_VECTORS * TILE;
    const int64_t acc_bytes = head_dim * sizeof(float);
    _tile_loadd(0, acc + d, acc_bytes);
    _tile_loadd(1, acc + d + 16, acc_bytes);
    if constexpr (BOTH) {
      _tile_loadd(2, acc + d + 32, acc_bytes);
      _tile_loadd(3, acc + d + 48, acc_bytes);
    }
    for (int n = 0; n < num_tokens; n += 16) {
      const Rows values(v + n * stride, stride, num_tokens - n, head_dim, s.keys);
      _tile_loadd(5, values.base + d, values.stride * 2);
      if constexpr (BOTH) _tile_loadd(6, values.base + d + 32, values.stride * 2);
      _tile_loadd(4, even + n, TILE * 4);
      _tile_dpbf16ps(0, 4, 5);
      if constexpr (BOTH) _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(4, odd + n, TILE * 4);
      _tile_dpbf16ps(1, 4, 5);
      if constexpr (BOTH) _tile_dpbf16ps(3, 4, 6);
    }
    _tile_stored(0, acc + d, acc_bytes);
    _tile_stored(1, acc + d + 16, acc_bytes);
    if constexpr (BOTH) {
      _tile_stored(2, acc + d + 32, acc_bytes);
      _tile_stored(3, acc + d + 48, acc_bytes);
    }
  }
};

#endif

}  // namespace
