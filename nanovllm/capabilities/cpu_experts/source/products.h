// Products of rows of a matrix with rows of activations, for any format.
//
// The codes of a slice are made once and multiplied by a few rows of x. In bf16 a code times an activation is exact, the
// products of a group are summed in fp32, and the scale multiplies the sum; least * sum of x is added for each group. In
// fp32 each value is computed as ggml does it, and multiplied.

#pragma once

#include "formats.h"

namespace {

struct Activations {       // rows of num_columns
  const float* floats;     // nullptr: not needed
  const Bfloat16* pairs;   // nullptr: x is not in bf16
  const float* sums;       // of each slice; nullptr: not needed
  int64_t num_columns;
};

template <class Body, size_t... I> inline void unrolled(Body body, std::index_sequence<I...>) {
  (body(std::integral_constant<int, int(I)>()), ...);
}

template <int N, class Body> inline void unrolled(Body body) { unrolled(body, std::make_index_sequence<N>()); }

// Reads memory ahead of the products, in the order of addresses, one step at a time.
struct Prefetching {
  const uint8_t* at;
  const uint8_t* end;
  void step(int64_t num_bytes) {
    for (const uint8_t* until = at + num_bytes; at < until && at < end; at += 64) __builtin_prefetch(at, 0, 3);
  }
};

// sums[r * T + t] = row r of the matrix . row x_rows[t] of x
template <class Format, int R, int T>
inline void multiply_floats(const Row (&rows)[R], const Activations& x, const int32_t* x_rows, Prefetching& ahead,
                            float (&sums)[R * T]) {
  Floats totals[R][T] = {};
  Format formats[R];
  const float* of_tokens[T];
  for (int t = 0; t < T; ++t) of_tokens[t] = x.floats + x_rows[t] * x.num_columns;
  const int64_t num_blocks = x.num_columns / Format::COLUMNS;
  for (int64_t b = 0; b < num_blocks; ++b) {
    for (int r = 0; r < R; ++r) formats[r].begin(rows[r], b);
    ahead.step(R * Format::BLOCK_BYTES);
    unrolled<Format::COLUMNS / SLICE>([&](auto s) {
      const int64_t column = b * Format::COLUMNS + s * SLICE;
      for (int r = 0; r < R; ++r) {
        SliceFloats values;
        codes_of<s>(formats[r], values);
        for (int v = 0; v < SLICE_VECTORS; ++v) {
          if constexpr (Format::GROUP_SLICES) values[v] *= formats[r].scale_at(s * SLICE + v * W);
          if constexpr (Format::HAS_LEAST) values[v] -= formats[r].least_at(s * SLICE + v * W);
          for (int t = 0; t < T; ++t) totals[r][t] += values[v] * load(of_tokens[t] + column + v * W);
        }
      }
    });
  }
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) sums[r * T + t] = sum(totals[r][t]);
}

#if defined(__AVX512BF16__)
template <int s, class Format> inline __m512 scales_of(const Format& format) {
  const float scale = format.scale_at(s * SLICE);
  if constexpr (std::is_same_v<Format, Q6KFormat>) {  // lanes 0 to 7 have the sums of the first 16 columns
    const __m256 second = _mm256_set1_ps(format.scale_at(s * SLICE + 16));
    return _mm512_insertf32x8(_mm512_set1_ps(scale), second, 1);
  } else {
    return _mm512_set1_ps(scale);
  }
}

// Adds least * sum of x for all slices of a block to the lanes of `total`.
template <class Format> inline void add_leasts(const Format& format, const float* sums, __m256& total) {
  if constexpr (Format::COLUMNS == SLICE)
    total = _mm256_fmadd_ps(_mm256_set_m128(_mm_setzero_ps(), _mm_set_ss(format.least)),
                            _mm256_set_m128(_mm_setzero_ps(), _mm_load_ss(sums)), total);
  else
    total = _mm256_fmadd_ps(_mm256_load_ps(format.leasts), _mm256_loadu_ps(sums), total);
}

template <class Format, int R, int T>
inline void multiply_pairs(const Row (&rows)[R], const Activations& x, const int32_t* x_rows, Prefetching& ahead,
                           float (&sums)[R * T]) {
  constexpr int NUM_SLICES = Format::COLUMNS / SLICE, GROUP = Format::GROUP_SLICES;
  __m512 totals[R][T] = {}, group_sums[R][T];
  __m256 leasts[R][T] = {};
  Format formats[R];
  const Bfloat16* of_tokens[T];
  for (int t = 0; t < T; ++t) of_tokens[t] = x.pairs + x_rows[t] * x.num_columns;
  const int64_t num_blocks = x.num_columns / Format::COLUMNS;
  for (int64_t b = 0; b < num_blocks; ++b) {
    for (int r = 0; r < R; ++r) formats[r].begin(rows[r], b);
    ahead.step(R * Format::BLOCK_BYTES);
    unrolled<NUM_SLICES>([&](auto s) {
      const int64_t column = b * Format::COLUMNS + s * SLICE;
      for (int r = 0; r < R; ++r) {
        const __m512bh codes = pairs_of<s>(formats[r]);
        for (int t = 0; t < T; ++t) {
          const __m512bh of_x = pairs_in(_mm512_loadu_si512(of_tokens[t] + column));
          if constexpr (GROUP == 0) {
            totals[r][t] = _mm512_dpbf16_ps(totals[r][t], codes, of_x);
          } else {
            const __m512 before = s % GROUP ? group_sums[r][t] : _mm512_setzero_ps();
            group_sums[r][t] = _mm512_dpbf16_ps(before, codes, of_x);
            if constexpr (s % GROUP == GROUP - 1)
              totals[r][t] = _mm512_fmadd_ps(scales_of<s>(formats[r]), group_sums[r][t], totals[r][t]);
          }
        }
      }
    });
    if constexpr (Format::HAS_LEAST)
      for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t)
          add_leasts(formats[r], x.sums + (x_rows[t] * num_blocks + b) * NUM_SLICES, leasts[r][t]);
  }
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) {
      __m512 total = totals[r][t];
      if constexpr (Format::HAS_LEAST) total = _mm512_sub_ps(total, _mm512_insertf32x8(_mm512_setzero_ps(), leasts[r][t], 0));
      sums[r * T + t] = sum(Floats(total));
    }
}
#endif

// products[i * NUM_ROWS + r] = row first_row + r . row x_rows[i] of x, for all i < num_x_rows. `next` is memory that this
// thread reads afterwards.
template <class Format, int NUM_ROWS, int R, int T>
inline void multiply_some(const Matrix& matrix, int64_t first_row, const Activations& x, const int32_t* x_rows,
                          Prefetching& ahead, float* products) {
  auto rows = [&]<size_t... I>(std::index_sequence<I...>) -> std::array<Row, R> {
    return {Row(matrix, first_row + int64_t(I))...};
  }(std::make_index_sequence<R>());
  const Row(&its_rows)[R] = *reinterpret_cast<const Row(*)[R]>(rows.data());
  float sums[R * T];
#if defined(__AVX512BF16__)
  if constexpr (Format::HAS_PAIRS) {
    if (x.pairs) multiply_pairs<Format, R, T>(its_rows, x, x_rows, ahead, sums);
    else multiply_floats<Format, R, T>(its_rows, x, x_rows, ahead, sums);
  } else
#endif
    multiply_floats<Format, R, T>(its_rows, x, x_rows, ahead, sums);
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) products[t * NUM_ROWS + r] = sums[r * T + t];
}

#if defined(__AVX512F__)
constexpr int ROWS_OF_ONE = 4, ROWS_OF_MANY = 2;  // rows of the matrix that share the loads of x
#else
constexpr int ROWS_OF_ONE = 2, ROWS_OF_MANY = 1;
#endif
constexpr int MANY = 4;  // rows of x that share the codes

template <int NUM_ROWS>
inline void multiply(const Matrix& matrix, int64_t first_row, const Activations& x, const int32_t* x_rows,
                     int64_t num_x_rows, const uint8_t* next, float* products) {
  with_format(matrix, [&](auto format) {
    using Format = decltype(format);
    constexpr int R = ROWS_OF_ONE;
    for (int r = 0; r < NUM_ROWS; r += R) {
      const bool is_last = r + R == NUM_ROWS;
      const uint8_t* start = is_last ? next : matrix.codes + (first_row + r + R) * matrix.row_bytes;
      Prefetching ahead{start, start ? start + R * matrix.row_bytes : nullptr};
      int64_t i = 0;
      for (; i + MANY <= num_x_rows; i += MANY)
        for (int part = 0; part < R; part += ROWS_OF_MANY)
          multiply_some<Format, NUM_ROWS, ROWS_OF_MANY, MANY>(matrix, first_row + r + part, x, x_rows + i, ahead,
                                                              products + i * NUM_ROWS + r + part);
      for (; i < num_x_rows; ++i)
        multiply_some<Format, NUM_ROWS, R, 1>(matrix, first_row + r, x, x_rows + i, ahead,
                                              products + i * NUM_ROWS + r);
    }
  });
}

}  // namespace
