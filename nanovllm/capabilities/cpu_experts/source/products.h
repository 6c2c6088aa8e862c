// Products of rows of a matrix with rows of activations, for any format.
//
// The codes of a slice are made once and multiplied by a few rows of x. The products of a group are summed in fp32, and
// the scale multiplies the sum; least * sum of x is subtracted for each group. Codes and x are in bf16, so that each
// product is exact, or both are in fp32.

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
  const float* biases() const { return matrix->biases ? matrix->biases + first_row : nullptr; }
};

// Fetches memory some KiB before the products read it: the rest of a piece, and the beginning of the next one. Without
// it a thread waits at the beginning of each piece, and the pieces of an expert have a few KiB.
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

inline Floats widened(__m256 values) {
#if defined(__AVX512F__)
  return Floats(_mm512_zextps256_ps512(values));
#else
  return Floats(values);
#endif
}

// Subtracts least * sum of x for all slices of a block. The lanes of `total` are summed later, so any lane will do.
template <class Format> inline void subtract_leasts(const Format& format, const float* sums, Floats& total) {
  if constexpr (Format::COLUMNS == SLICE)
    total -= widened(_mm256_zextps128_ps256(_mm_set_ss(format.least))) * broadcast(*sums);
  else
    total -= widened(_mm256_load_ps(format.leasts)) * widened(_mm256_loadu_ps(sums));
}

// sums[r * T + t] = row r of the matrix . row x_rows[t] of x
template <class Format, int R, int T>
inline void multiply_floats(const std::array<Row, R>& rows, const Activations& x, const int32_t* x_rows,
                            Prefetching& ahead, float (&sums)[R * T]) {
  constexpr int NUM_SLICES = Format::COLUMNS / SLICE, GROUP = Format::SCALE_COLUMNS;
  Floats totals[R * T] = {}, group_sums[R * T];
  Format formats[R];
  const float* of_tokens[T];
  for (int t = 0; t < T; ++t) of_tokens[t] = x.floats + x_rows[t] * x.num_columns;
  const int64_t num_blocks = x.num_columns / Format::COLUMNS;
  for (int64_t b = 0; b < num_blocks; ++b) {
    for (int r = 0; r < R; ++r) formats[r].begin(rows[r], b);
    ahead.step(R * Format::BLOCK_BYTES);
    unrolled<NUM_SLICES>([&](auto s) {
      for (int r = 0; r < R; ++r) {
        SliceFloats codes;
        codes_of<s>(formats[r], codes);
        for (int v = 0; v < SLICE_VECTORS; ++v) {
          const int column = s * SLICE + v * W;
          for (int t = 0; t < T; ++t) {
            const Floats of_x = load(of_tokens[t] + b * Format::COLUMNS + column);
            if constexpr (GROUP == 0) {
              totals[r * T + t] += codes[v] * of_x;
            } else {
              Floats& group_sum = group_sums[r * T + t];
              group_sum = column % GROUP ? group_sum + codes[v] * of_x : codes[v] * of_x;
              if ((column + W) % GROUP == 0)
                totals[r * T + t] += formats[r].scale_at(column) * Format::CODE_UNIT * group_sum;
            }
          }
        }
      }
    });
    if constexpr (Format::HAS_LEAST)
      for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t)
          subtract_leasts(formats[r], x.sums + (x_rows[t] * num_blocks + b) * NUM_SLICES, totals[r * T + t]);
  }
  sum_lanes(totals, sums);
}

#if defined(__AVX512BF16__)
template <int s, class Format> inline Floats scales_of(const Format& format) {
  const __m512 scale = _mm512_set1_ps(format.scale_at(s * SLICE));
  if constexpr (Format::SCALE_COLUMNS >= SLICE) return Floats(scale);
  else  // lanes 0 to 7 have the sums of the first 16 columns
    return Floats(_mm512_insertf32x8(scale, _mm256_set1_ps(format.scale_at(s * SLICE + 16)), 1));
}

template <class Format, int R, int T>
inline void multiply_pairs(const std::array<Row, R>& rows, const Activations& x, const int32_t* x_rows,
                           Prefetching& ahead, float (&sums)[R * T]) {
  constexpr int NUM_SLICES = Format::COLUMNS / SLICE, GROUP = Format::GROUP_SLICES;
  Floats totals[R * T] = {};
  Format formats[R];
  const Bfloat16* of_tokens[T];
  for (int t = 0; t < T; ++t) of_tokens[t] = x.pairs + x_rows[t] * x.num_columns;
  const int64_t num_blocks = x.num_columns / Format::COLUMNS;
  for (int64_t b = 0; b < num_blocks; ++b) {
    for (int r = 0; r < R; ++r) formats[r].begin(rows[r], b);
    ahead.step(R * Format::BLOCK_BYTES);
    for (int r = 0; r < R; ++r) {  // one row after the other: few registers are in use at a time
      __m512 group_sums[T];
      unrolled<NUM_SLICES>([&](auto s) {
        const __m512bh codes = pairs_of<s>(formats[r]);
        for (int t = 0; t < T; ++t) {
          const __m512bh of_x = pairs_in(_mm512_loadu_si512(of_tokens[t] + b * Format::COLUMNS + s * SLICE));
          Floats& total = totals[r * T + t];
          if constexpr (GROUP == 0) {
            total = Floats(_mm512_dpbf16_ps(__m512(total), codes, of_x));
          } else {
            group_sums[t] = _mm512_dpbf16_ps(s % GROUP ? group_sums[t] : _mm512_setzero_ps(), codes, of_x);
            if constexpr (s % GROUP == GROUP - 1) total += scales_of<s>(formats[r]) * Floats(group_sums[t]);
          }
        }
      });
    }
    if constexpr (Format::HAS_LEAST)
      for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t)
          subtract_leasts(formats[r], x.sums + (x_rows[t] * num_blocks + b) * NUM_SLICES, totals[r * T + t]);
  }
  sum_lanes(totals, sums);
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

constexpr int ROWS = 4;  // of a piece that are read at once
constexpr int MANY = 4;  // rows of x that share the codes

// Rows of the piece that share the loads of T rows of x.
#if defined(__AVX512F__)
constexpr int rows_for(int num_x_rows) { return num_x_rows == MANY ? 2 : 4; }
#else
constexpr int rows_for(int num_x_rows) { return 4 / num_x_rows; }
#endif

// products[i * NUM_ROWS + r] = row r of the piece . row x_rows[i] of x, for all i < num_x_rows. `next` is what this
// thread reads afterwards.
template <int NUM_ROWS>
inline void multiply(const Piece& piece, const Piece& next, const Activations& x, const int32_t* x_rows,
                     int64_t num_x_rows, float* products) {
  with_format(*piece.matrix, [&](auto format) {
    using Format = decltype(format);
    Prefetching ahead(piece, next, ROWS), none = ahead.nothing();
    for (int r = 0; r < NUM_ROWS; r += ROWS) {
      int64_t i = 0;
      const auto some = [&](auto num) {
        constexpr int T = num, R = rows_for(T);
        for (int part = r; part < r + ROWS; part += R)
          multiply_some<Format, NUM_ROWS, R, T>(*piece.matrix, piece.first_row + part, x, x_rows + i, i ? none : ahead,
                                                products + i * NUM_ROWS + part);
        i += T;
      };
      while (i + MANY <= num_x_rows) some(std::integral_constant<int, MANY>());
      if (i + 2 <= num_x_rows) some(std::integral_constant<int, 2>());
      if (i < num_x_rows) some(std::integral_constant<int, 1>());
    }
  });
}

}  // namespace
