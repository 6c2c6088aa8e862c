// Tiles in bf16 with AMX: products of matrices.

#pragma once

#include "tile.h"

#if defined(__AMX_BF16__)

namespace {

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

}  // namespace
#endif
