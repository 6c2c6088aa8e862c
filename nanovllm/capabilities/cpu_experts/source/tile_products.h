// Products of 16 rows of a matrix with up to 16 rows of x by the matrix unit (AMX): 16 x 32 by 32 x 16, in bf16, summed
// in fp32. The codes of 256 columns are made while the unit multiplies those of the 256 before them, and the scales are
// applied one step later still, because the sums take long to leave the unit.
//
// Legend: T rows of x, G groups of columns with a scale of their own in a step.

#pragma once

#include <atomic>

#include "products.h"

#if defined(__AMX_BF16__)

namespace {

constexpr int TILE_ROWS = 16, MAX_TILE_TOKENS = 16;
constexpr int STEP_SLICES = 8, STEP_COLUMNS = STEP_SLICES * SLICE;

// Rows of x as the matrix unit reads them. One row is as it is anywhere else.
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

// Adds codes [16][32] . x [32][T] to tile C. The compiler does not know that these instructions read memory.
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

// The matrix unit of one thread: its configuration, and which row and token each lane of the sums [16][T] belongs to.
class MatrixUnit {
 public:
  alignas(64) Ints row_of[MAX_TILE_TOKENS], token_of[MAX_TILE_TOKENS];

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
    if (num_tokens != num_tokens_)
      for (int i = 0; i < num_tokens * W; ++i) {
        row_of[i / W][i % W] = i / num_tokens;
        token_of[i / W][i % W] = i % num_tokens;
      }
    num_tokens_ = num_tokens;
    num_pairs_ = num_pairs;
  }

 private:
  int num_tokens_ = 0, num_pairs_ = 0;
};

inline Floats permuted(Floats values, Ints places) {
  return Floats(_mm512_permutexvar_ps(__m512i(places), __m512(values)));
}

template <class Format> class TileProducts {
 public:
  // products[t * stride + r] = row first_row + r . row t of x, for 16 rows.
  static void multiply(MatrixUnit& unit, const Matrix& matrix, int64_t first_row, const TokenTiles& x,
                       Prefetching& ahead, float* products, int64_t stride) {
    TileProducts it(unit, matrix, first_row, x, ahead);
    unit.configure(x.num_tokens, PAIRS);
    if constexpr (IS_SCALED) it.multiply_steps();
    else it.multiply_rows();
    for (int t = 0; t < x.num_tokens; ++t)
      for (int r = 0; r < TILE_ROWS; ++r) products[t * stride + r] = it.totals_[r * x.num_tokens + t];
  }

 private:
  static constexpr bool IS_SCALED = Format::GROUP_SLICES > 0, IS_LARGE = Format::COLUMNS == STEP_COLUMNS;
  static constexpr int GROUP_COLUMNS = IS_SCALED ? Format::SCALE_COLUMNS : SLICE;
  static constexpr int NUM_GROUPS = STEP_COLUMNS / GROUP_COLUMNS;
  static constexpr int PAIRS = std::min(GROUP_COLUMNS, SLICE) / 2;         // that are multiplied at a time
  static constexpr int PARTS = GROUP_COLUMNS / (2 * PAIRS);                // products of a group
  static constexpr int STEP_BLOCKS = STEP_COLUMNS / Format::COLUMNS;
  static constexpr int BLOCK_SLICES = Format::COLUMNS / SLICE, BLOCK_GROUPS = Format::COLUMNS / GROUP_COLUMNS;

  struct Codes {
    alignas(64) Bfloat16 of[STEP_SLICES][TILE_ROWS][SLICE];
  };
  // Large blocks: [row][8 scales, 8 leasts, or 16 scales], as they lie in the format. Others: [group or 8 + group][row].
  struct Scales {
    alignas(64) float of[TILE_ROWS][W];
  };
  struct Sums {
    alignas(64) float of[NUM_GROUPS * TILE_ROWS * MAX_TILE_TOKENS];  // [G][16][T]
  };

  MatrixUnit& unit_;
  const TokenTiles& x_;
  Prefetching& ahead_;
  const int64_t num_columns_, row_bytes_;
  std::array<Row, TILE_ROWS> rows_;
  alignas(64) float totals_[TILE_ROWS * MAX_TILE_TOKENS];  // [16][T]
  Codes codes_[2];
  Scales scales_[4];  // a step's are needed two steps later
  Sums sums_[2];

  TileProducts(MatrixUnit& unit, const Matrix& matrix, int64_t first_row, const TokenTiles& x, Prefetching& ahead)
      : unit_(unit), x_(x), ahead_(ahead), num_columns_(matrix.num_columns), row_bytes_(matrix.row_bytes),
        rows_([&]<size_t... I>(std::index_sequence<I...>) {
          return std::array<Row, TILE_ROWS>{Row(matrix, first_row + int64_t(I))...};
        }(std::make_index_sequence<TILE_ROWS>())) {}

  void multiply_steps() {
    std::memset(totals_, 0, sizeof(float) * TILE_ROWS * x_.num_tokens);
    const int64_t num_steps = (num_columns_ + STEP_COLUMNS - 1) / STEP_COLUMNS;
    for (int64_t step = 0; step < num_steps + 2; ++step) {
      std::atomic_signal_fence(std::memory_order_seq_cst);  // the codes are in memory before tiles read them
      unrolled<STEP_SLICES>([&](auto i) {
        if (step < num_steps) {
          unpack(step, 2 * i);
          unpack(step, 2 * i + 1);
          ahead_.step(2 * STEP_BLOCKS * Format::BLOCK_BYTES);
        }
        if (step > 0 && step <= num_steps) multiply_slice<i>(step - 1);
      });
      if (step > 1) add_groups(step - 2);
    }
  }

  // Codes and scales of row r.
  void unpack(int64_t step, int r) {
    Codes& codes = codes_[step % 2];
    Scales& scales = scales_[step % 4];
    unrolled<STEP_BLOCKS>([&](auto b) {
      const int64_t block = step * STEP_BLOCKS + b;
      if (STEP_BLOCKS > 1 && block * Format::COLUMNS >= num_columns_) return;
      Format format;
      format.begin(rows_[r], block);
      unrolled<BLOCK_SLICES>([&](auto s) {
        _mm512_store_si512(codes.of[b * BLOCK_SLICES + s][r], bits_of<__m512i>(pairs_of<s>(format)));
      });
      if constexpr (IS_LARGE) {
        store_vector(scales.of[r], scales_in(format));
      } else {
        for (int g = 0; g < BLOCK_GROUPS; ++g)
          scales.of[b * BLOCK_GROUPS + g][r] = format.scale_at(g * GROUP_COLUMNS);
        if constexpr (Format::HAS_LEAST) scales.of[8 + b][r] = format.least;
      }
    });
  }

  static Floats scales_in(const Format& format) {
    if constexpr (requires { format.half_scales; }) return load(format.half_scales);
    else return load(format.scales);  // and leasts, which follow
  }

  // Product i of a step. Neighbours belong to different groups, because a sum takes long to be ready for another one.
  template <int i> void multiply_slice(int64_t step) {
    constexpr int GROUPS = std::min(NUM_GROUPS, STEP_SLICES), group = i % GROUPS, part = i / GROUPS;
    constexpr int slice = group * PARTS + part;
    if (step * STEP_COLUMNS + slice * SLICE >= num_columns_) return;
    constexpr int TILES = SLICE / 2 / PAIRS;  // of a slice
    const int64_t num_tokens = x_.num_tokens;
    unrolled<TILES>([&](auto t) {
      constexpr int of_step = group * TILES + t, c = of_step % 4;
      const Bfloat16* x = x_.pairs + (step * STEP_COLUMNS + slice * SLICE + t * 2 * PAIRS) * num_tokens;
      if constexpr (part == 0) clear_tile<c>();
      add_product<c>(codes_[step % 2].of[slice][0] + t * 2 * PAIRS, SLICE * 2, x, 4 * num_tokens);
      if constexpr (part == PARTS - 1)
        store_tile<c>(sums_[step % 2].of + of_step * TILE_ROWS * num_tokens, 4 * num_tokens);
    });
  }

  // totals += scale * sum of products - least * sum of x
  void add_groups(int64_t step) {
    const int64_t num_tokens = x_.num_tokens;
    const int64_t left = (num_columns_ - step * STEP_COLUMNS) / GROUP_COLUMNS;
    const int num_groups = int(std::min<int64_t>(left, NUM_GROUPS));
    Words scales[W];
    for (int i = 0; i < W; ++i) scales[i] = load_vector<Words>(scales_[step % 4].of[i]);
    if constexpr (IS_LARGE) transpose(scales);
    const float* sums = sums_[step % 2].of;
    const float* of_x = x_.sums + step * STEP_SLICES * num_tokens;
    const __mmask16 tokens = __mmask16((1u << num_tokens) - 1);
    for (int v = 0; v < num_tokens; ++v) {
      Floats total = load(totals_ + v * W);
      unrolled<NUM_GROUPS>([&](auto g) {
        if (!IS_LARGE && g >= num_groups) return;
        const Floats scale = permuted(bits_of<Floats>(scales[g]), unit_.row_of[v]);
        total += scale * load(sums + (g * num_tokens + v) * W);
        if constexpr (Format::HAS_LEAST) {
          const Floats least = permuted(bits_of<Floats>(scales[8 + g]), unit_.row_of[v]);
          const auto sums_of_x = Floats(_mm512_maskz_loadu_ps(tokens, of_x + g * num_tokens));
          total -= least * permuted(sums_of_x, unit_.token_of[v]);
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
