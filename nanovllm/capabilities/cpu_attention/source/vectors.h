// Vectors of floats as wide as the instruction set has them, conversions from and to 16 bits, and what tiles do with vectors.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include <immintrin.h>

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;  // floats in a vector
#else
constexpr int W = 8;
#endif

typedef float Floats __attribute__((vector_size(W * 4)));
typedef int32_t Ints __attribute__((vector_size(W * 4)));
typedef uint32_t Words __attribute__((vector_size(W * 4)));
typedef uint16_t Halves __attribute__((vector_size(W * 2)));

// Rows of a tile whose sums are kept in registers together, for two columns each.
#if defined(__AVX512F__)
constexpr int ROW_BLOCK = 8;  // of 32 registers
#else
constexpr int ROW_BLOCK = 4;  // of 16 registers
#endif

constexpr int TILE = 64;          // tokens that are scored together
constexpr int MAX_VECTORS = 16;   // query vectors of one kv head that are computed together: R of a tile
constexpr int MAX_HEAD_DIM = 512;
constexpr float NO_KEY = -std::numeric_limits<float>::infinity();
constexpr float LOG2_E = 1.44269504088896340736f;
constexpr float LN_2 = 0.69314718055994530942f;

enum Dtype : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };
struct Bfloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };

template <class To, class From> inline To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From), "a change of type keeps every bit");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <class V> inline V load_vector(const void* from) {
  V to;
  std::memcpy(&to, from, sizeof(to));
  return to;
}

template <class V> inline void store_vector(void* to, V from) { std::memcpy(to, &from, sizeof(from)); }

inline Floats broadcast(float value) { return value - Floats{}; }

inline Floats load(const float* from) { return load_vector<Floats>(from); }

inline Floats load(const Bfloat16* from) {
  return bits_of<Floats>(__builtin_convertvector(load_vector<Halves>(from), Words) << 16);
}

inline Floats load(const Float16* from) {
#if defined(__AVX512F__)
  return bits_of<Floats>(_mm512_cvtph_ps(load_vector<__m256i>(from)));
#else
  return bits_of<Floats>(_mm256_cvtph_ps(load_vector<__m128i>(from)));
#endif
}

inline void store_as(float* to, float value) { *to = value; }

inline void store_as(Bfloat16* to, float value) {
  const uint32_t bits = bits_of<uint32_t>(value);
  to->bits = std::isnan(value) ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // to nearest even
}

inline void store_as(Float16* to, float value) {
  const uint32_t bits = bits_of<uint32_t>(value), sign = (bits >> 16) & 0x8000;
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) {
    to->bits = 0x7e00;
  } else if (magnitude >= 65520.0f) {
    to->bits = uint16_t(sign | 0x7c00);
  } else if (magnitude < 0x1p-14f) {  // a subnormal: the sum rounds to its unit, 2^-24
    to->bits = uint16_t(sign | (bits_of<uint32_t>(magnitude + 0.5f) - bits_of<uint32_t>(0.5f)));
  } else {
    const uint32_t rebased = bits_of<uint32_t>(magnitude) - (112u << 23);
    to->bits = uint16_t(sign | ((rebased + 0xfff + ((rebased >> 13) & 1)) >> 13));
  }
}

inline Floats max(Floats a, Floats b) { return a <= b ? b : a; }  // NaN in `a` stays NaN

template <int S, size_t... I> inline Floats exchange(Floats values, std::index_sequence<I...>) {
  return __builtin_shufflevector(values, values, (int(I) ^ S)...);
}

// All lanes combined into one, in log2(W) steps.
template <int S = W / 2, class Combine> inline float reduce(Floats values, Combine combine) {
  values = combine(values, exchange<S>(values, std::make_index_sequence<W>()));
  if constexpr (S > 1) return reduce<S / 2>(values, combine);
  else return values[0];
}

inline float largest(Floats values) { return reduce(values, [](Floats a, Floats b) { return max(a, b); }); }

inline float sum(Floats values) { return reduce(values, [](Floats a, Floats b) { return a + b; }); }

// 2^x for x <= 0, within 2 units in the last place; 0 below -126. The polynomial is the Taylor series of 2^f at 0 up to
// f^7; with |f| <= 1/2 the next term is under 6e-9.
inline Floats exp2_of(Floats x) {
  constexpr float ROUND = 0x1.8p23f;  // adding it leaves the nearest integer in the low bits
  const Floats clamped = max(x, broadcast(-127.0f));
  const Floats shifted = clamped + ROUND;
  const Floats f = clamped - (shifted - ROUND);
  Floats p = broadcast(1.5252734e-5f);
  p = p * f + 1.5403530e-4f;
  p = p * f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  const Words exponent = (bits_of<Words>(shifted) + 127u) << 23;  // of 2^n; n = -127 gives 0
  return p * bits_of<Floats>(exponent);
}

template <int S, size_t... I> inline void swap_halves(Words& a, Words& b, std::index_sequence<I...>) {
  const Words low = __builtin_shufflevector(a, b, (int(I) & S ? W + int(I) - S : int(I))...);
  b = __builtin_shufflevector(a, b, (int(I) & S ? W + int(I) : int(I) + S)...);
  a = low;
}

template <int S> inline void transpose_step(Words (&rows)[W]) {
  for (int r = 0; r < W; ++r)
    if (!(r & S)) swap_halves<S>(rows[r], rows[r + S], std::make_index_sequence<W>());
}

// Fetches what follows `BYTES` that are read now. The processor does this by itself only where a token's heads are few:
// it does not follow steps of a KiB or more from one token to the next.
template <int BYTES> inline void prefetch_following(const void* now) {
  constexpr int LINE = 64;
  for (int i = 0; i < BYTES; i += LINE)
    __builtin_prefetch(static_cast<const char*>(now) + (BYTES < LINE ? LINE : BYTES) + i, 0, 3);
}

// rows[i] = load(i), and 0 from num_rows on.
template <class Load> inline void load_rows(Words (&rows)[W], int num_rows, Load load) {
  if (num_rows >= W) {
    for (int i = 0; i < W; ++i) rows[i] = load(i);
  } else {
    for (int i = 0; i < W; ++i) rows[i] = i < num_rows ? load(i) : Words{};
  }
}

inline void transpose(Words (&rows)[W]) {
  transpose_step<1>(rows);
  transpose_step<2>(rows);
  transpose_step<4>(rows);
  if constexpr (W >= 16) transpose_step<(W >= 16 ? 8 : 1)>(rows);
}

// Calls body(std::integral_constant<int, n>()), 1 <= n <= MAX.
template <int MAX, class Body> inline void with_constant(int n, Body body) {
  if constexpr (MAX > 1)
    if (n < MAX) return with_constant<MAX - 1>(n, body);
  body(std::integral_constant<int, MAX>());
}

// Calls body(first row, constant number of rows) for nearly equal blocks of at most ROW_BLOCK rows.
template <class Body> inline void for_row_blocks(int num_rows, Body body) {
  int first = 0;
  for (int blocks_left = (num_rows + ROW_BLOCK - 1) / ROW_BLOCK; blocks_left; --blocks_left) {
    const int size = (num_rows - first + blocks_left - 1) / blocks_left;
    with_constant<ROW_BLOCK>(size, [&](auto constant) { body(first, constant); });
    first += size;
  }
}

// Columns for which the sums of so many rows are computed together. With few sums, each would wait for its last product.
constexpr int columns_for(int rows) { return rows <= 2 ? 4 : 2; }

}  // namespace
