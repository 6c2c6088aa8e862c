// Products of 16 rows of a matrix with up to 16 rows of x by the matrix unit (AMX): 16 x 32 by 32 x 16, in bf16, summed
// in fp32. A step makes the codes of 256 columns and multiplies them. The sums take long to leave the unit, so the next
// step applies the scales.
//
// Legend: T rows of x, G groups of columns with a scale of their own in a step.

#pragma once

#include <atomic>

#include "products.h"

#if defined(__AMX_BF16__)

namespace {

constexpr int TILE_ROWS = 16, MAX_TILE_TOKENS = 16;
constexpr int STEP_SLICES = 8, STEP_COLUMNS = STEP_SLICES * SLICE;

// Rows of x as the matrix unit reads them.
struct TokenTiles {
  const Bfloat16* pairs;  // [K / 2][T] pairs of neighbouring columns
  const float* sums;      // [K / SLICE][T]
  int num_tokens;
};

template <int C> inline void clear_tile() {
  if constexpr (C == 0) _tile_zero(0);
  if constexpr (C == 1) _tile_zero(1);
  if constexpr (C == 2) _tile_zero(2);
  if constexpr (C == 3) _tile_zero(3);
}

template <int C> inline void store_tile(float* to, int64_t row_bytes) {
  if constexpr (C == 0) _tile_stored(0, to, row_bytes);
  if constexpr (C == 1) _tile_stored(1, to, row_bytes);
  if constexpr (C == 2) _tile_stored(2, to, row_bytes);
  if constexpr (C == 3) _tile_stored(3, to, row_bytes);
}

// Adds codes [16][32] . x [32][T] to tile C. Compilers do not know that these instructions read memory: a fence before
// them, and the store of the sums after them, keep them in their place.
template <int C>
inline void add_product(const void* codes, int64_t row_bytes, const void* x, int64_t pair_bytes) {
  if constexpr (C % 2 == 0) {
    _tile_loadd(4, codes, row_bytes);
    _tile_loadd(6, x, pair_bytes);
  } else {
    _tile_loadd(5, codes, row_bytes);
    _tile_loadd(7, x, pair_bytes);
  }
  if constexpr (C == 0) _tile_dpbf16ps(0, 4, 6);
  if constexpr (C == 1) _tile_dpbf16ps(1, 5, 7);
  if constexpr (C == 2) _tile_dpbf16ps(2, 4, 6);
  if constexpr (C == 3) _tile_dpbf16ps(3, 5, 7);
}

// Lays out rows of x, which load_pairs(row, pair) reads 16 pairs at a time.
template <class LoadPairs>
inline void lay_out_pairs(Bfloat16* to, int64_t num_columns, int num_tokens, LoadPairs load_pairs) {
  const __mmask16 tokens = __mmask16((1u << num_tokens) - 1);
  for (int64_t pair = 0; pair < num_columns / 2; pair += W) {
    Words rows[W];
    load_rows(rows, num_tokens, [&](int i) { return load_pairs(i, pair); });
    transpose(rows);
    for (int i = 0; i < W; ++i)
      _mm512_mask_storeu_epi32(to + (pair + i) * num_tokens * 2, tokens, __m512i(rows[i]));
  }
}

// Which row and which token each of the sums [16][T] belongs to.
struct alignas(64) SumPlaces {
  uint8_t row[MAX_TILE_TOKENS + 1][TILE_ROWS * MAX_TILE_TOKENS];
  uint8_t token[MAX_TILE_TOKENS + 1][TILE_ROWS * MAX_TILE_TOKENS];
  constexpr SumPlaces() : row{}, token{} {
    for (int t = 1; t <= MAX_TILE_TOKENS; ++t)
      for (int i = 0; i < TILE_ROWS * t; ++i) {
        row[t][i] = uint8_t(i / t);
        token[t][i] = uint8_t(i % t);
      }
  }
};
constexpr SumPlaces SUM_PLACES;

// The matrix unit of one thread.
class MatrixUnit {
 public:
  ~MatrixUnit() {
    if (num_tokens_) _tile_release();
  }

  // For products of `num_pairs` pairs of columns at a time. Configuring takes as long as ten products.
  void configure(int num_tokens, int num_pairs) {
    if (num_tokens == num_tokens_ && num_pairs == num_pairs_) return;
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 8; ++tile) {  // 0 to 3: sums, 4 and 5: codes, 6 and 7: x
      const bool is_codes = tile == 4 || tile == 5;
      config.row_bytes[tile] = uint16_t(4 * (is_codes ? num_pairs : num_tokens));
      config.rows[tile] = uint8_t(tile < 6 ? TILE_ROWS : num_pairs);
    }
    _tile_loadconfig(&config);
    num_tokens_ = num_tokens;
    num_pairs_ = num_pairs;
  }

 private:
  int num_tokens_ = 0, num_pairs_ = 0;
};

// values[places[i]] of 16 bytes
inline Floats permuted(Floats values, const uint8_t* places) {
  return Floats(_mm512_permutexvar_ps(_mm512_cvtepu8_epi32(load_vector<__m128i>(places)), __m512(values)));
}

template <class Format> class TileProducts {
 public:
  // products[t * stride + r] = row first_row + r . row t of x, for 16 rows.
  static void multiply(MatrixUnit& unit, const Matrix& matrix, int64_t first_row, const TokenTiles& x,
                       Prefetching& ahead, float* products, int64_t stride) {
    unit.configure(x.num_tokens, PAIRS);
    TileProducts it(matrix, first_row, x, ahead);
    if constexpr (IS_SCALED) it.multiply_steps();
    else it.multiply_rows();
    for (int t = 0; t < x.num_tokens; ++t)
      for (int r = 0; r < TILE_ROWS; ++r) products[t * stride + r] = it.totals_[r * x.num_tokens + t];
  }

 private:
  static constexpr bool IS_SCALED = Format::GROUP_SLICES > 0, IS_LARGE = Format::COLUMNS == STEP_COLUMNS;
  static constexpr int GROUP_COLUMNS = IS_SCALED ? Format::SCALE_COLUMNS : SLICE;
  static constexpr int NUM_GROUPS = STEP_COLUMNS / GROUP_COLUMNS;
  static constexpr int PAIRS = std::min(GROUP_COLUMNS, SLICE) / 2;  // that are multiplied at a time
  static constexpr int SLICE_TILES = SLICE / 2 / PAIRS, GROUP_TILES = GROUP_COLUMNS / (2 * PAIRS);
  static constexpr int STEP_BLOCKS = STEP_COLUMNS / Format::COLUMNS;
  static constexpr int BLOCK_SLICES = Format::COLUMNS / SLICE, BLOCK_GROUPS = Format::COLUMNS / GROUP_COLUMNS;

  // What the next step needs of a step.
  struct Sums {
    alignas(64) float of[NUM_GROUPS * TILE_ROWS * MAX_TILE_TOKENS];  // [G][16][T]
    // Large blocks: [row][8 scales, 8 leasts, or 16 scales], as in the format. Others: [group, 8 + group][row]
    alignas(64) float scales[TILE_ROWS][W];
  };

  const TokenTiles x_;
  Prefetching& ahead_;
  const int64_t num_columns_, row_bytes_;
  Row rows_[TILE_ROWS];
  alignas(64) float totals_[TILE_ROWS * MAX_TILE_TOKENS];  // [16][T]
  alignas(64) Bfloat16 codes_[STEP_SLICES][TILE_ROWS][SLICE];
  Sums sums_[2];

  TileProducts(const Matrix& matrix, int64_t first_row, const TokenTiles& x, Prefetching& ahead)
      : TileProducts(matrix, Row(matrix, first_row), x, ahead, matrix.groups_of_row(),
                     std::make_index_sequence<TILE_ROWS>()) {}

  template <size_t... I>
  TileProducts(const Matrix& matrix, const Row& first, const TokenTiles& x, Prefetching& ahead, int64_t row_groups,
               std::index_sequence<I...>)
      : x_(x), ahead_(ahead), num_columns_(matrix.num_columns), row_bytes_(matrix.row_bytes),
        rows_{first.after(I, matrix.row_bytes, row_groups)...} {}

  void multiply_steps() {
    std::memset(totals_, 0, sizeof(float) * TILE_ROWS * x_.num_tokens);
    const int64_t num_steps = (num_columns_ + STEP_COLUMNS - 1) / STEP_COLUMNS;
    for (int64_t step = 0; step < num_steps; ++step) {
      const int num_slices = int(std::min<int64_t>(num_columns_ / SLICE - step * STEP_SLICES, STEP_SLICES));
      for (int r = 0; r < TILE_ROWS; ++r) {
        unpack(step, num_slices, r);
        ahead_.step(STEP_BLOCKS * Format::BLOCK_BYTES);
      }
      std::atomic_signal_fence(std::memory_order_seq_cst);  // the codes are in memory before tiles read them
      unrolled<STEP_SLICES>([&](auto i) { multiply_slice<i>(step, num_slices); });
      if (step > 0) add_groups(step - 1, NUM_GROUPS);
      if (step == num_steps - 1) add_groups(step, num_slices * NUM_GROUPS / STEP_SLICES);
    }
  }

  // Codes and scales of row r.
  void unpack(int64_t step, int num_slices, int r) {
    float(&scales)[TILE_ROWS][W] = sums_[step % 2].scales;
    unrolled<STEP_BLOCKS>([&](auto b) {
      if (STEP_BLOCKS > 1 && b * BLOCK_SLICES >= num_slices) return;
      Format format;
      format.begin(rows_[r], step * STEP_BLOCKS + b);
      unrolled<BLOCK_SLICES>([&](auto s) {
        _mm512_store_si512(codes_[b * BLOCK_SLICES + s][r], bits_of<__m512i>(pairs_of<s>(format)));
      });
      if constexpr (IS_LARGE) {
        store_vector(scales[r], scales_in(format));
      } else {
        for (int g = 0; g < BLOCK_GROUPS; ++g) scales[b * BLOCK_GROUPS + g][r] = format.scale_at(g * GROUP_COLUMNS);
        if constexpr (Format::HAS_LEAST) scales[8 + b][r] = format.least;
      }
    });
  }

  static Floats scales_in(const Format& format) {
    if constexpr (requires { format.half_scales; }) return load(format.half_scales);
    else return load(format.scales);  // and leasts, which follow
  }

  // Product i of a step. Neighbours belong to different groups, because a sum takes long to be ready for another one.
  template <int i> void multiply_slice(int64_t step, int num_slices) {
    constexpr int GROUPS = std::min(NUM_GROUPS, STEP_SLICES), slice = i % GROUPS * GROUP_TILES + i / GROUPS;
    if (slice >= num_slices) return;
    const int64_t num_tokens = x_.num_tokens;
    unrolled<SLICE_TILES>([&](auto t) {
      constexpr int group = i % GROUPS * SLICE_TILES + t, c = group % 4;
      const Bfloat16* x = x_.pairs + (step * STEP_COLUMNS + slice * SLICE + t * 2 * PAIRS) * num_tokens;
      if constexpr (i < GROUPS) clear_tile<c>();
      add_product<c>(codes_[slice][0] + t * 2 * PAIRS, SLICE * 2, x, 4 * num_tokens);
      if constexpr (i / GROUPS == GROUP_TILES - 1)
        store_tile<c>(sums_[step % 2].of + group * TILE_ROWS * num_tokens, 4 * num_tokens);
    });
  }

  // totals += scale * sum of products - least * sum of x
  void add_groups(int64_t step, int num_groups) {
    const int64_t num_tokens = x_.num_tokens;
    const Sums& sums = sums_[step % 2];
    const float* of_x = x_.sums + step * STEP_SLICES * num_tokens;
    Words scales[W];
    for (int i = 0; i < W; ++i) scales[i] = load_vector<Words>(sums.scales[i]);
    if constexpr (IS_LARGE) transpose(scales);
    const __mmask16 tokens = __mmask16((1u << num_tokens) - 1);
    for (int v = 0; v < num_tokens; ++v) {
      const uint8_t* row = SUM_PLACES.row[num_tokens] + v * W;
      Floats total = load(totals_ + v * W);
      unrolled<NUM_GROUPS>([&](auto g) {
        if (!IS_LARGE && g >= num_groups) return;
        total += permuted(bits_of<Floats>(scales[g]), row) * load(sums.of + (g * num_tokens + v) * W);
        if constexpr (Format::HAS_LEAST) {
          const auto sums_of_x = Floats(_mm512_maskz_loadu_ps(tokens, of_x + g * num_tokens));
          total -= permuted(bits_of<Floats>(scales[8 + g]), row) *
                   permuted(sums_of_x, SUM_PLACES.token[num_tokens] + v * W);
        }
      });
      store_vector(totals_ + v * W, total);
    }
  }

  // The codes are the values, and the unit reads them where they are.
  void multiply_rows() {
    const int64_t num_tokens = x_.num_tokens, num_slices = num_columns_ / SLICE;
    std::atomic_signal_fence(std::memory_order_seq_cst);
    unrolled<4>([](auto c) { clear_tile<c>(); });
    for (int64_t s = 0; s < num_slices; s += 4)
      unrolled<4>([&](auto c) {
        if (s + c >= num_slices) return;
        add_product<c>(rows_[0].codes + (s + c) * 64, row_bytes_, x_.pairs + (s + c) * SLICE * num_tokens,
                       4 * num_tokens);
        ahead_.step(TILE_ROWS * 64);
      });
    alignas(64) float sums[4][TILE_ROWS * MAX_TILE_TOKENS];
    unrolled<4>([&](auto c) { store_tile<c>(sums[c], 4 * num_tokens); });
    for (int v = 0; v < num_tokens; ++v)
      store_vector(totals_ + v * W, (load(sums[0] + v * W) + load(sums[1] + v * W)) +
                                        (load(sums[2] + v * W) + load(sums[3] + v * W)));
  }
};

// products[i * num_rows + r] = row r of the piece . row i of x. `next` is what this thread reads afterwards.
inline void multiply_tiles(MatrixUnit& unit, const Piece& piece, const Piece& next, const TokenTiles& x,
                           float* products) {
  with_format(*piece.matrix, [&](auto format) {
    using Format = decltype(format);
    if constexpr (Format::HAS_PAIRS) {
      Prefetching ahead(piece, next, TILE_ROWS);
      for (int64_t r = 0; r < piece.num_rows; r += TILE_ROWS)
        TileProducts<Format>::multiply(unit, *piece.matrix, piece.first_row + r, x, ahead, products + r,
                                       piece.num_rows);
    }
  });
}

}  // namespace

#endif
