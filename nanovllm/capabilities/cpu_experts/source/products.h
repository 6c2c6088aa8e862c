// Products of rows of a matrix with rows of activations, for any format.
//
// The codes of a slice are made once and multiplied by a few rows of x. In bf16 a code times an activation is exact, the
// products of a group are summed in fp32, and the scale multiplies the sum; least * sum of x is added for each group. In
// fp32 each value is computed as ggml does it, and multiplied.

#pragma once

#include <algorithm>
#include <array>

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

// Rows of a matrix that one thread reads one after the other.
struct Piece {
  const Matrix* matrix;  // nullptr: no piece
  int64_t first_row, num_rows;

  const uint8_t* start() const { return matrix->codes + first_row * matrix->row_bytes; }
  int64_t num_bytes() const { return num_rows * matrix->row_bytes; }
};

// Fetches memory some KiB before the products read it: the rest of a piece, and the beginning of the next one. Without it
// a thread waits at the beginning of each piece, and the pieces of an expert have a few KiB.
class Prefetching {
 public:
  // `num_rows` rows are read at once, so they are all fetched before the first of them is read.
  Prefetching(const Piece& now, const Piece& next, int64_t num_rows) {
    at_ = now.start() + ahead(now, num_rows);
    end_ = now.start() + now.num_bytes();
    if (!next.matrix) return;
    next_ = next.start();
    next_end_ = next_ + ahead(next, num_rows);
    const Row row(*next.matrix, next.first_row);
    const int64_t num_groups = next.num_rows * next.matrix->groups_of_row();
    fetch(row.scales, num_groups * int64_t(sizeof(float)));
    if (row.zeros) fetch(row.zeros, num_groups * int64_t(sizeof(int16_t)));
  }

  // For rows that are read again.
  Prefetching nothing() const {
    Prefetching none = *this;
    none.at_ = none.end_ = none.next_ = none.next_end_ = nullptr;
    return none;
  }

  void step(int64_t num_bytes) {
    for (due_ += num_bytes; due_ > 0; due_ -= 64) {
      if (at_ >= end_) {
        at_ = next_;
        end_ = next_end_;
        next_ = next_end_ = nullptr;
      }
      if (at_ < end_) __builtin_prefetch(at_, 0, 3);
      at_ += 64;
    }
  }

 private:
  static constexpr int64_t LEAST_AHEAD = 8192;
  const uint8_t *at_, *end_, *next_ = nullptr, *next_end_ = nullptr;
  int64_t due_ = 0;

  static int64_t ahead(const Piece& piece, int64_t num_rows) {
    return std::min(std::max(num_rows * piece.matrix->row_bytes, LEAST_AHEAD), piece.num_bytes());
  }

  static void fetch(const void* from, int64_t num_bytes) {
    for (int64_t at = 0; at < num_bytes; at += 64) __builtin_prefetch(static_cast<const char*>(from) + at, 0, 3);
  }
};

// The sums of the lanes of each vector.
template <int N> inline void sum_lanes(const Floats (&vectors)[N], float (&sums)[N]) {
  if constexpr (N % 4 == 0) {  // four at a time, which takes a third of the instructions
    for (int i = 0; i < N; i += 4) {
      __m256 halves[4];
      for (int j = 0; j < 4; ++j) {
#if defined(__AVX512F__)
        const __m512 all = __m512(vectors[i + j]);
        halves[j] = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
#else
        halves[j] = __m256(vectors[i + j]);
#endif
      }
      const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(halves[0], halves[1]), _mm256_hadd_ps(halves[2], halves[3]));
      _mm_storeu_ps(sums + i, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
    }
  } else {
    for (int i = 0; i < N; ++i) sums[i] = sum(vectors[i]);
  }
}

// sums[r * T + t] = row r of the matrix . row x_rows[t] of x
template <class Format, int R, int T>
inline void multiply_floats(const std::array<Row, R>& rows, const Activations& x, const int32_t* x_rows, Prefetching& ahead,
                            float (&sums)[R * T]) {
  Floats totals[R * T] = {};
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
          for (int t = 0; t < T; ++t) totals[r * T + t] += values[v] * load(of_tokens[t] + column + v * W);
        }
      }
    });
  }
  sum_lanes(totals, sums);
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
inline void multiply_pairs(const std::array<Row, R>& rows, const Activations& x, const int32_t* x_rows, Prefetching& ahead,
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
  Floats all[R * T];
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) {
      const __m512 least = Format::HAS_LEAST ? _mm512_zextps256_ps512(leasts[r][t]) : _mm512_setzero_ps();
      all[r * T + t] = Floats(_mm512_sub_ps(totals[r][t], least));
    }
  sum_lanes(all, sums);
}
#endif

// products[t * NUM_ROWS + r] = row first_row + r . row x_rows[t] of x, for R rows and T rows of x.
template <class Format, int NUM_ROWS, int R, int T>
inline void multiply_some(const Matrix& matrix, int64_t first_row, const Activations& x, const int32_t* x_rows,
                          Prefetching& ahead, float* products) {
  const auto rows = [&]<size_t... I>(std::index_sequence<I...>) {
    return std::array<Row, R>{Row(matrix, first_row + int64_t(I))...};
  }(std::make_index_sequence<R>());
  float sums[R * T];
#if defined(__AVX512BF16__)
  if constexpr (Format::HAS_PAIRS) {
    if (x.pairs) multiply_pairs<Format, R, T>(rows, x, x_rows, ahead, sums);
    else multiply_floats<Format, R, T>(rows, x, x_rows, ahead, sums);
  } else
#endif
    multiply_floats<Format, R, T>(rows, x, x_rows, ahead, sums);
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) products[t * NUM_ROWS + r] = sums[r * T + t];
}

#if defined(__AVX512F__)
constexpr int ROWS_OF_ONE = 4, ROWS_OF_MANY = 2;  // rows of the matrix that share the loads of x
#else
constexpr int ROWS_OF_ONE = 4, ROWS_OF_MANY = 1;
#endif
constexpr int MANY = 4;  // rows of x that share the codes

// products[i * NUM_ROWS + r] = row r of the piece . row x_rows[i] of x, for all i < num_x_rows. `next` is what this thread
// reads afterwards.
template <int NUM_ROWS>
inline void multiply(const Piece& piece, const Piece& next, const Activations& x, const int32_t* x_rows,
                     int64_t num_x_rows, float* products) {
  with_format(*piece.matrix, [&](auto format) {
    using Format = decltype(format);
    constexpr int R = ROWS_OF_ONE;
    Prefetching ahead(piece, next, R), none = ahead.nothing();
    for (int r = 0; r < NUM_ROWS; r += R) {
      const int64_t row = piece.first_row + r;
      int64_t i = 0;
      for (; i + MANY <= num_x_rows; i += MANY)
        for (int part = 0; part < R; part += ROWS_OF_MANY)
          multiply_some<Format, NUM_ROWS, ROWS_OF_MANY, MANY>(*piece.matrix, row + part, x, x_rows + i,
                                                              i ? none : ahead, products + i * NUM_ROWS + r + part);
      for (; i < num_x_rows; ++i)
        multiply_some<Format, NUM_ROWS, R, 1>(*piece.matrix, row, x, x_rows + i, i ? none : ahead,
                                              products + i * NUM_ROWS + r);
    }
  });
}

}  // namespace
