// The types of weights: how the codes of a slice, 32 neighbouring columns of a row, become numbers.
//
// A weight is a matrix [N, K] for each expert. Its rows consist of blocks. A format, the type's struct below, is placed
// on one block of one row by `begin`. A value is code * scale - least, where a slice has one scale and one least (Q6_K:
// two scales). Codes are exact in bf16, except in F16 and F32. Legend of the fields of GGUF's blocks:
// models/gguf_values.py.
//
//   COLUMNS           of a block
//   GROUP_SLICES      slices that are summed before the scale multiplies the sum; 0 if the codes are the values
//   SCALE_COLUMNS     columns with the same scale; 0 if the codes are the values
//   HAS_LEAST         false if every least is 0
//   HAS_PAIRS         true if the codes are exact in bf16
//   floats<s>(out)    the codes of slice s in fp32, divided by CODE_UNIT
//   pairs<s>()        the codes of slice s in bf16
//   indices<s>()      32 bytes from which int8s_of and pairs_of make the codes, where a format lacks the former two
//   scale_at(column)
//   least, leasts     of the block, or of its slices

#pragma once

#include <algorithm>
#include <array>
#include <bit>

#include "../../cpu_attention/source/vectors.h"

namespace {

constexpr int SLICE = 32;
constexpr int SLICE_VECTORS = SLICE / W;
using SliceFloats = Floats[SLICE_VECTORS];

enum WeightType : int64_t {  // mirrored by WeightType in store.py; GGUF's types have its numbers
  F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, IQ4_NL = 20,
  IQ4_XS = 23, BF16 = 30, MXFP4 = 39, INT4 = 100, INT8 = 101, E4M3 = 102
};

struct Matrix {          // of all experts of a layer, [experts, N, K]; mirrored by CMatrix in store.py
  const uint8_t* codes;  // row_bytes for each row
  const float* scales;   // [experts, N, K / group], of INT4, INT8 and E4M3
  const int16_t* zeros;  // the same shape, or nullptr: every zero is `zero`
  const float* biases;   // [experts, N], or nullptr: no biases
  int64_t type, num_rows, num_columns, row_bytes, group, zero;

  int64_t groups_of_row() const { return group ? num_columns / group : 0; }
};

struct Row {
  const uint8_t* codes;
  const float* scales;
  const int16_t* zeros;  // nullptr: every zero is `zero`
  int16_t zero;

  Row(const Matrix& matrix, int64_t row) : zero(int16_t(matrix.zero)) {
    codes = matrix.codes + row * matrix.row_bytes;
    scales = matrix.scales + row * matrix.groups_of_row();
    zeros = matrix.zeros ? matrix.zeros + row * matrix.groups_of_row() : nullptr;
  }

  // The row that follows `count` rows later.
  Row after(int64_t count, int64_t row_bytes, int64_t num_groups) const {
    Row row = *this;
    row.codes += count * row_bytes;
    row.scales += count * num_groups;
    if (zeros) row.zeros += count * num_groups;
    return row;
  }
};

// -- bytes ----------------------------------------------------------------------------------------------------------

inline float half_at(const uint8_t* from) { return _cvtsh_ss(load_vector<uint16_t>(from)); }

inline __m256i load32(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }

inline __m256i every_byte(int value) { return _mm256_set1_epi8(char(value)); }

// The low nibbles of 16 bytes, then their high nibbles.
inline __m256i nibbles_of_16(const uint8_t* from) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(bytes, 4), bytes), every_byte(15));
}

// Bits PLACE to PLACE + WIDTH - 1 of 32 bytes.
template <int PLACE, int WIDTH> inline __m256i fields_of_32(const uint8_t* from) {
  return _mm256_and_si256(_mm256_srli_epi16(load32(from), PLACE), every_byte((1 << WIDTH) - 1));
}

template <int BITS> inline __m256i shift_bytes(__m256i small) { return _mm256_slli_epi16(small, BITS); }

// Bit i of `bits` as byte i: `value` or 0.
inline __m256i bytes_of_bits(uint32_t bits, int value) {
  const __m256i spread = _mm256_shuffle_epi8(
      _mm256_set1_epi32(int(bits)), _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303));
  const __m256i bit = _mm256_set1_epi64x(int64_t(0x8040201008040201));
  return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit), every_byte(value));
}

inline void floats_of(__m256i int8s, SliceFloats& out) {
  const __m128i halves[2] = {_mm256_castsi256_si128(int8s), _mm256_extracti128_si256(int8s, 1)};
#if defined(__AVX512F__)
  for (int i = 0; i < 2; ++i) out[i] = Floats(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(halves[i])));
#else
  for (int i = 0; i < 2; ++i) {
    out[2 * i] = Floats(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(halves[i])));
    out[2 * i + 1] = Floats(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(halves[i], 8))));
  }
#endif
}

// Loads that extend bytes are cheaper than shuffles of a register.
inline void floats_of(const uint8_t* int8s, SliceFloats& out) {
  for (int i = 0; i < SLICE_VECTORS; ++i) {
#if defined(__AVX512F__)
    out[i] = Floats(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_vector<__m128i>(int8s + i * W))));
#else
    out[i] = Floats(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(load_vector<int64_t>(int8s + i * W)))));
#endif
  }
}

// -- numbers in bf16 ------------------------------------------------------------------------------------------------

using Table = std::array<uint16_t, 32>;  // what a permutation of 32 words looks up

constexpr uint16_t bfloat16_of(float exact) { return uint16_t(std::bit_cast<uint32_t>(exact) >> 16); }

// First `first`, then one more for each entry. Tables of 16 entries are repeated: the fifth bit of an index is ignored.
constexpr Table counting_table(int first, int num_entries) {
  Table table{};
  for (int i = 0; i < 32; ++i) table[i] = bfloat16_of(float(first + i % num_entries));
  return table;
}

constexpr Table table_of(const std::array<int8_t, 16>& values) {
  Table table{};
  for (int i = 0; i < 32; ++i) table[i] = bfloat16_of(float(values[i % 16]));
  return table;
}

constexpr int MAX_INT4_ZERO = 16;

struct alignas(64) Tables {
  Table less_zero[MAX_INT4_ZERO + 1];  // of 4 bits: code - zero
  constexpr Tables() : less_zero{} {
    for (int zero = 0; zero <= MAX_INT4_ZERO; ++zero) less_zero[zero] = counting_table(-zero, 16);
  }
};
constexpr Tables INT4_TABLES;

#if defined(__AVX512BF16__)
inline __m512bh pairs_in(__m512i words) { return bits_of<__m512bh>(words); }

inline __m512i look_up(__m512i indices, const Table& table) {
  return _mm512_permutexvar_epi16(indices, _mm512_loadu_si512(table.data()));
}

// The nibbles of 16 bytes as `nibbles_of_16` orders them, looked up in a table that is repeated.
inline __m512bh look_up_nibbles_of_16(const uint8_t* from, const Table& table) {
  const __m256i bytes = _mm256_cvtepu8_epi16(load_vector<__m128i>(from));
  return pairs_in(look_up(_mm512_inserti64x4(_mm512_castsi256_si512(bytes), _mm256_srli_epi16(bytes, 4), 1), table));
}

inline __m512bh pairs_of_floats(const SliceFloats& codes) { return _mm512_cvtne2ps_pbh(codes[1], codes[0]); }
#endif

// What codes of few bits mean. `indices` are bytes.

template <int BITS, int ZERO> struct Counting {  // index - ZERO
  static constexpr Table TABLE = counting_table(-ZERO, BITS == 4 ? 16 : 32), UPPER = counting_table(32 - ZERO, 32);
  static __m256i int8s_of(__m256i indices) { return _mm256_sub_epi8(indices, every_byte(ZERO)); }
#if defined(__AVX512BF16__)
  static __m512bh pairs_of(__m256i indices) {
    const __m512i words = _mm512_cvtepu8_epi16(indices), low = _mm512_loadu_si512(TABLE.data());
    if constexpr (BITS <= 5) return pairs_in(_mm512_permutexvar_epi16(words, low));
    else return pairs_in(_mm512_permutex2var_epi16(low, words, _mm512_loadu_si512(UPPER.data())));
  }
#endif
};

template <const std::array<int8_t, 16>& VALUES> struct Lookup {
  static constexpr Table TABLE = table_of(VALUES);
  static __m256i int8s_of(__m256i indices) {
    const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(VALUES.data()));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), indices);
  }
#if defined(__AVX512BF16__)
  static __m512bh pairs_of(__m256i indices) {
    return pairs_in(look_up(_mm512_cvtepu8_epi16(indices), TABLE));
  }
#endif
};

constexpr std::array<int8_t, 16> IQ4_VALUES = {-127, -104, -83, -65, -49, -35, -22, -10,
                                               1,    13,   25,  38,  53,  69,  89,  113};
constexpr std::array<int8_t, 16> MXFP4_VALUES = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// -- GGUF's blocks of 32 values -------------------------------------------------------------------------------------

struct SmallBlock {
  static constexpr int COLUMNS = SLICE, GROUP_SLICES = 1, SCALE_COLUMNS = SLICE;
  static constexpr float CODE_UNIT = 1;
  static constexpr bool HAS_LEAST = false, HAS_PAIRS = true;
  const uint8_t* block;
  float scale, least = 0;
  float scale_at(int) const { return scale; }
};

template <int BYTES, int CODES, class Meaning> struct Nibbles : SmallBlock, Meaning {
  static constexpr int BLOCK_BYTES = BYTES;
  void begin(const Row& row, int64_t b) {
    block = row.codes + b * BYTES;
    scale = half_at(block);
  }
  template <int> __m256i indices() const { return nibbles_of_16(block + CODES); }
#if defined(__AVX512BF16__)
  template <int> __m512bh pairs() const { return look_up_nibbles_of_16(block + CODES, Meaning::TABLE); }
#endif
};

using Q4_0Format = Nibbles<18, 2, Counting<4, 8>>;
using IQ4NLFormat = Nibbles<18, 2, Lookup<IQ4_VALUES>>;

struct Q4_1Format : Nibbles<20, 4, Counting<4, 0>> {
  static constexpr bool HAS_LEAST = true;
  void begin(const Row& row, int64_t b) {
    Nibbles::begin(row, b);
    least = -half_at(block + 2);
  }
};

struct MXFP4Format : Nibbles<17, 1, Lookup<MXFP4_VALUES>> {
  void begin(const Row& row, int64_t b) {
    block = row.codes + b * BLOCK_BYTES;
    const uint32_t e = block[0];  // 2^(e - 128), because the codes are twice the numbers; 0 and 1 give subnormals
    scale = bits_of<float>(e < 2 ? (1u << 21) << e : (e - 1) << 23);
  }
};

template <int BYTES, int HIGH, class Meaning> struct FiveBits : SmallBlock, Meaning {
  static constexpr int BLOCK_BYTES = BYTES;
  void begin(const Row& row, int64_t b) {
    block = row.codes + b * BYTES;
    scale = half_at(block);
  }
  template <int> __m256i indices() const {
    const __m256i high = bytes_of_bits(load_vector<uint32_t>(block + HIGH), 16);
    return _mm256_or_si256(nibbles_of_16(block + HIGH + 4), high);
  }
};

using Q5_0Format = FiveBits<22, 2, Counting<5, 16>>;

struct Q5_1Format : FiveBits<24, 4, Counting<5, 0>> {
  static constexpr bool HAS_LEAST = true;
  void begin(const Row& row, int64_t b) {
    FiveBits::begin(row, b);
    least = -half_at(block + 2);
  }
};

struct Q8_0Format : SmallBlock {
  static constexpr int BLOCK_BYTES = 34;
  void begin(const Row& row, int64_t b) {
    block = row.codes + b * BLOCK_BYTES;
    scale = half_at(block);
  }
  template <int> void floats(SliceFloats& out) const { floats_of(block + 2, out); }
};

// -- GGUF's blocks of 256 values ------------------------------------------------------------------------------------

struct LargeBlock {
  static constexpr int COLUMNS = 256, GROUP_SLICES = 1, SCALE_COLUMNS = SLICE;
  static constexpr float CODE_UNIT = 1;
  static constexpr bool HAS_LEAST = false, HAS_PAIRS = true;
  const uint8_t* block;
  alignas(32) float scales[8], leasts[8];
  float scale_at(int column) const { return scales[column / SLICE]; }
};

struct KBlock : LargeBlock {
  static constexpr bool HAS_LEAST = true;
  // The first 16 bytes are both factors and 12 bytes with 6 bits for each group: the scales of groups 0 to 3, their
  // leasts, and the low bits of groups 4 to 7, whose high bits are those above the 6 bits of groups 0 to 3.
  void read_groups() {
    constexpr int SIX = 0x3f3f3f3f, FOUR = 0x0f0f0f0f, HIGH = 0x30303030;
    const __m128i head = load_vector<__m128i>(block);
    const __m128i low = _mm_shuffle_epi32(head, _MM_SHUFFLE(3, 2, 3, 1));    // scales 0-3 and 4-7, leasts 0-3 and 4-7
    const __m128i upper = _mm_shuffle_epi32(head, _MM_SHUFFLE(2, 2, 1, 1));  // has the high bits of 4-7
    const __m128i bytes = _mm_or_si128(
        _mm_and_si128(_mm_srlv_epi32(low, _mm_setr_epi32(0, 0, 0, 4)), _mm_setr_epi32(SIX, FOUR, SIX, FOUR)),
        _mm_and_si128(_mm_srli_epi32(upper, 2), _mm_setr_epi32(0, HIGH, 0, HIGH)));
    const __m128 factors = _mm_cvtph_ps(head);
    store_groups(scales, bytes, _mm256_broadcastss_ps(factors));
    store_groups(leasts, _mm_srli_si128(bytes, 8), _mm256_broadcastss_ps(_mm_movehdup_ps(factors)));
  }
  static void store_groups(float* to, __m128i bytes, __m256 factor) {
    _mm256_store_ps(to, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)), factor));
  }
};

struct Q4KFormat : KBlock, Counting<4, 0> {
  static constexpr int BLOCK_BYTES = 144;
  void begin(const Row& row, int64_t b) {
    block = row.codes + b * BLOCK_BYTES;
    read_groups();
  }
  template <int s> __m256i indices() const { return fields_of_32<s % 2 * 4, 4>(block + 16 + s / 2 * 32); }
#if defined(__AVX512BF16__)
  template <int s> __m512bh pairs() const {  // as pairs_of(indices), without the masks
    static constexpr Table table = counting_table(0, 16);
    const __m512i bytes = _mm512_cvtepu8_epi16(load32(block + 16 + s / 2 * 32));
    return pairs_in(look_up(s % 2 ? _mm512_srli_epi16(bytes, 4) : bytes, table));
  }
#endif
};

struct Q5KFormat : KBlock, Counting<5, 0> {
  static constexpr int BLOCK_BYTES = 176;
  void begin(const Row& row, int64_t b) {
    block = row.codes + b * BLOCK_BYTES;
    read_groups();
  }
  template <int s> __m256i indices() const {
    const __m256i low = fields_of_32<s % 2 * 4, 4>(block + 48 + s / 2 * 32);
    return _mm256_or_si256(low, shift_bytes<4>(fields_of_32<s, 1>(block + 16)));
  }
};

struct Q6KFormat : LargeBlock, Counting<6, 32> {
  static constexpr int BLOCK_BYTES = 210, SCALE_COLUMNS = 16;
  alignas(64) float half_scales[16];  // of 16 columns each
  float scale_at(int column) const { return half_scales[column / 16]; }
  void begin(const Row& row, int64_t b) {
    block = row.codes + b * BLOCK_BYTES;
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block + 192));
    const __m256 scale = _mm256_set1_ps(half_at(block + 208));
    const __m256i low = _mm256_cvtepi8_epi32(bytes), high = _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8));
    _mm256_store_ps(half_scales, _mm256_mul_ps(_mm256_cvtepi32_ps(low), scale));
    _mm256_store_ps(half_scales + 8, _mm256_mul_ps(_mm256_cvtepi32_ps(high), scale));
  }
  template <int s> __m256i indices() const {
    const __m256i low = fields_of_32<s / 2 % 2 * 4, 4>(block + s / 4 * 64 + s % 2 * 32);
    return _mm256_or_si256(low, shift_bytes<4>(fields_of_32<s % 4 * 2, 2>(block + 128 + s / 4 * 32)));
  }
};

struct IQ4XSFormat : LargeBlock, Lookup<IQ4_VALUES> {
  static constexpr int BLOCK_BYTES = 136;
  void begin(const Row& row, int64_t b) {
    block = row.codes + b * BLOCK_BYTES;
    const __m256i low = spread(load_vector<int32_t>(block + 4), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28), 15);
    const __m256i high = spread(load_vector<uint16_t>(block + 2), _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14), 3);
    const __m256i sixes = _mm256_sub_epi32(_mm256_or_si256(low, _mm256_slli_epi32(high, 4)), _mm256_set1_epi32(32));
    _mm256_store_ps(scales, _mm256_mul_ps(_mm256_cvtepi32_ps(sixes), _mm256_set1_ps(half_at(block))));
  }
  static __m256i spread(int bits, __m256i places, int mask) {
    return _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(bits), places), _mm256_set1_epi32(mask));
  }
  template <int s> __m256i indices() const { return nibbles_of_16(block + 8 + s * 16); }
#if defined(__AVX512BF16__)
  template <int s> __m512bh pairs() const { return look_up_nibbles_of_16(block + 8 + s * 16, TABLE); }
#endif
};

// -- codes in the order of the GPU's kernels (kernels/packed_values.py) ---------------------------------------------
//
// 64 bytes are 32 words of 16 bits. Bits B * s to B * s + B - 1 of word i have the code of column 32 * s + i.

struct WordBlock {
  static constexpr int BLOCK_BYTES = 64;
  static constexpr float CODE_UNIT = 1;
  static constexpr bool HAS_LEAST = false, HAS_PAIRS = true;
  const uint8_t* block;


  // 16 words of the 32, or 16 words that were made of them.
  static __m256i half_of(const uint8_t* from, int half) { return load32(from + half * 32); }

  static void floats_of_words(__m256i words, Floats* out) {
#if defined(__AVX512F__)
    out[0] = Floats(_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(words)));
#else
    out[0] = Floats(_mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm256_castsi256_si128(words))));
    out[1] = Floats(_mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm256_extracti128_si256(words, 1))));
#endif
  }
};

template <int BITS, int SLICES_OF_GROUP> struct IntegerFormat : WordBlock {
  static constexpr int COLUMNS = 512 / BITS, GROUP_SLICES = SLICES_OF_GROUP;
  static constexpr int SCALE_COLUMNS = GROUP_SLICES * SLICE;
  const float* scales;   // of this block
  const int16_t* zeros;  // of this block, or of all blocks
  int64_t zero_mask;     // 0: all groups have the same zero

  float scale_at(int column) const { return scales[column / SCALE_COLUMNS]; }
  int zero_at(int slice) const { return zeros[slice / GROUP_SLICES & zero_mask]; }

  void begin(const Row& row, int64_t b) {
    block = row.codes + b * BLOCK_BYTES;
    scales = row.scales + b * (COLUMNS / SCALE_COLUMNS);
    zeros = row.zeros ? row.zeros + b * (COLUMNS / SCALE_COLUMNS) : &row.zero;
    zero_mask = row.zeros ? -1 : 0;
  }
  template <int s> void floats(SliceFloats& out) const {
    const __m256i mask = _mm256_set1_epi16((1 << BITS) - 1), zero = _mm256_set1_epi16(int16_t(zero_at(s)));
    for (int half = 0; half < 2; ++half) {
      const __m256i codes = _mm256_and_si256(_mm256_srli_epi16(half_of(block, half), BITS * s), mask);
      floats_of_words(_mm256_sub_epi16(codes, zero), out + half * SLICE_VECTORS / 2);
    }
  }
#if defined(__AVX512BF16__)
  template <int s> __m512bh pairs() const {
    if constexpr (BITS == 4) {
      const __m512i words = _mm512_srli_epi16(_mm512_loadu_si512(block), BITS * s);
      return pairs_in(look_up(words, INT4_TABLES.less_zero[zero_at(s)]));
    } else {
      SliceFloats codes;
      floats<s>(codes);
      return pairs_of_floats(codes);
    }
  }
#endif
};

template <int SLICES_OF_GROUP> struct E4M3Format : WordBlock {
  static constexpr int COLUMNS = SLICES_OF_GROUP * SLICE, GROUP_SLICES = SLICES_OF_GROUP;
  static constexpr int BLOCK_BYTES = COLUMNS, SCALE_COLUMNS = COLUMNS;
  static constexpr float CODE_UNIT = 256;
  float scale;
  float scale_at(int) const { return scale; }
  void begin(const Row& row, int64_t b) {
    block = row.codes + b * BLOCK_BYTES;
    scale = row.scales[b];
  }
  template <int s> void floats(SliceFloats& out) const {
    for (int half = 0; half < 2; ++half) {  // the bits in the place of fp16's are 2^-8 of the number
      const __m256i words = half_of(block + s / 2 * 64, half);
      const __m256i high = s % 2 ? words : _mm256_slli_epi16(words, 8);
      const __m256i magnitudes = _mm256_and_si256(_mm256_srli_epi16(high, 1), _mm256_set1_epi16(0x3f80));
      const __m256i signs = _mm256_and_si256(high, _mm256_set1_epi16(int16_t(0x8000)));
      alignas(32) Float16 halves[16];
      _mm256_store_si256(reinterpret_cast<__m256i*>(halves), _mm256_or_si256(magnitudes, signs));
      for (int i = 0; i < SLICE_VECTORS / 2; ++i) out[half * SLICE_VECTORS / 2 + i] = load(halves + i * W);
    }
  }
#if defined(__AVX512BF16__)
  template <int s> __m512bh pairs() const {
    static constexpr Table subnormals = [] {
      Table table{};
      for (int i = 0; i < 8; ++i) table[i] = bfloat16_of(float(i) / 512);
      return table;
    }();
    const __m512i loaded = _mm512_loadu_si512(block + s / 2 * 64);
    const __m512i words = s % 2 ? _mm512_srli_epi16(loaded, 8) : loaded;
    const __m512i magnitude = _mm512_and_si512(_mm512_slli_epi16(words, 4), _mm512_set1_epi16(0x07f0));
    const __m512i normal = _mm512_add_epi16(magnitude, _mm512_set1_epi16(120 << 7));
    const __mmask32 is_subnormal = _mm512_testn_epi16_mask(words, _mm512_set1_epi16(0x78));
    const __m512i index = _mm512_and_si512(words, _mm512_set1_epi16(7));
    const __m512i table = _mm512_loadu_si512(subnormals.data());
    const __m512i both = _mm512_mask_permutexvar_epi16(normal, is_subnormal, index, table);
    const __m512i signs = s % 2 ? loaded : _mm512_slli_epi16(loaded, 8);
    const __m512i sign_bit = _mm512_set1_epi16(int16_t(0x8000));
    return pairs_in(_mm512_ternarylogic_epi32(both, signs, sign_bit, 0xf8));  // both | (signs & sign_bit)
  }
#endif
};

// -- floats ---------------------------------------------------------------------------------------------------------

template <class T, bool IS_EXACT_IN_BF16> struct FloatFormat {
  static constexpr int COLUMNS = SLICE, GROUP_SLICES = 0, SCALE_COLUMNS = 0, BLOCK_BYTES = SLICE * sizeof(T);
  static constexpr float CODE_UNIT = 1;
  static constexpr bool HAS_LEAST = false, HAS_PAIRS = IS_EXACT_IN_BF16;
  const T* block;
  void begin(const Row& row, int64_t b) { block = reinterpret_cast<const T*>(row.codes + b * BLOCK_BYTES); }
  template <int> void floats(SliceFloats& out) const {
    for (int i = 0; i < SLICE_VECTORS; ++i) out[i] = load(block + i * W);
  }
#if defined(__AVX512BF16__)
  template <int> __m512bh pairs() const { return pairs_in(_mm512_loadu_si512(block)); }
#endif
};

// -- all formats ----------------------------------------------------------------------------------------------------

template <int s, class Format> inline void codes_of(const Format& format, SliceFloats& out) {
  if constexpr (requires { format.template floats<s>(out); }) format.template floats<s>(out);
  else floats_of(Format::int8s_of(format.template indices<s>()), out);
}

#if defined(__AVX512BF16__)
template <int s, class Format> inline __m512bh pairs_of(const Format& format) {
  if constexpr (requires { format.template pairs<s>(); }) {
    return format.template pairs<s>();
  } else if constexpr (requires { format.template indices<s>(); }) {
    return Format::pairs_of(format.template indices<s>());
  } else {
    SliceFloats codes;
    format.template floats<s>(codes);
    return pairs_of_floats(codes);
  }
}
#endif

// Calls body(Format()) with the format of the matrix.
template <class Body> inline void with_format(const Matrix& matrix, Body body) {
  switch (matrix.type) {
    case F32: return body(FloatFormat<float, false>());
    case F16: return body(FloatFormat<Float16, false>());
    case BF16: return body(FloatFormat<Bfloat16, true>());
    case Q4_0: return body(Q4_0Format());
    case Q4_1: return body(Q4_1Format());
    case Q5_0: return body(Q5_0Format());
    case Q5_1: return body(Q5_1Format());
    case Q8_0: return body(Q8_0Format());
    case Q4_K: return body(Q4KFormat());
    case Q5_K: return body(Q5KFormat());
    case Q6_K: return body(Q6KFormat());
    case IQ4_NL: return body(IQ4NLFormat());
    case IQ4_XS: return body(IQ4XSFormat());
    case MXFP4: return body(MXFP4Format());
    case E4M3:
      if (matrix.group == 64) return body(E4M3Format<2>());
      return body(E4M3Format<4>());
    case INT8:
      if (matrix.group == 32) return body(IntegerFormat<8, 1>());
      return body(IntegerFormat<8, 2>());
    default:  // INT4
      if (matrix.group == 32) return body(IntegerFormat<4, 1>());
      if (matrix.group == 64) return body(IntegerFormat<4, 2>());
      return body(IntegerFormat<4, 4>());
  }
}

inline bool has_pairs(const Matrix& matrix) { return matrix.type != F32 && matrix.type != F16; }

}  // namespace
