// Attention of a few query rows over keys that lie in CPU memory, with the log-sum-exp of the scores.
//
// This file is compiled once for each instruction set (build.py), and what differs between them is in the section "one
// tile". Python describes a job (job.py) and calls the functions at the end (compiled.py). The data flows like this:
//
//   queries   Each chunk of contiguous tokens is taken by one thread of a pool. It lays out the queries of the rows
//             that attend to the chunk, for all kv heads, as its matrix products need them.
//   tiles     64 tokens at a time, and for each kv head: scores = q k^T, the running maximum of each query vector, the
//             weights 2^(score - maximum), sums += weights v. Keys and values are read once, in the order of memory,
//             and the next tile is prefetched meanwhile.
//   partials  Each chunk leaves the sums, maxima and totals of its query vectors in the job's scratch memory.
//   output    When all chunks are done, the threads merge the partials of each row and head into out and lse.
//
// A job is the attention of one layer. It runs at once (nanovllm_attend), or a Server runs it when the GPU has written
// its queries. Everything is computed in fp32, except that the bf16 variants multiply bf16 by bf16 and sum in fp32; for
// that they round the weights to bf16.
//
// Legend: T query rows, H query heads, K kv heads, G = H / K query heads per kv head, D head dim.
// Legend of a tile: R query vectors of one kv head (rows x G), N tokens (TILE).

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

// -- vectors ----------------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr int W = 16;  // floats in a vector
#elif defined(__AVX__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float Floats __attribute__((vector_size(W * 4)));
typedef int32_t Ints __attribute__((vector_size(W * 4)));
typedef uint32_t Words __attribute__((vector_size(W * 4)));
typedef uint16_t Halves __attribute__((vector_size(W * 2)));

// Rows of a tile whose sums are kept in registers together, for two columns each.
#if defined(__AVX512F__) || !defined(__x86_64__)
constexpr int ROW_BLOCK = 8;  // of 32 registers
#elif defined(__AVX__)
constexpr int ROW_BLOCK = 4;  // of 16 registers
#else
constexpr int ROW_BLOCK = 4;  // of 16 registers, and products need some
#endif

constexpr int TILE = 64;          // tokens that are scored together
constexpr int MAX_VECTORS = 16;   // query vectors of one kv head that are computed together: R of a tile
constexpr int MAX_HEAD_DIM = 256;
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
#elif defined(__F16C__)
  return bits_of<Floats>(_mm256_cvtph_ps(load_vector<__m128i>(from)));
#else
  const Words half = __builtin_convertvector(load_vector<Halves>(from), Words);
  const Words magnitude = (half & 0x7fff) << 13;
  const Floats scaled = bits_of<Floats>(magnitude) * 0x1p112f;  // the exponent's bias is 112 less; exact for subnormals
  const Words infinite = bits_of<Words>(magnitude >= (0x7c00u << 13)) & 0x7f800000u;  // infinity and NaN
  return bits_of<Floats>(bits_of<Words>(scaled) | infinite | ((half & 0x8000) << 16));
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
  if constexpr (W >= 8) transpose_step<(W >= 8 ? 4 : 1)>(rows);
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

// -- one tile ---------------------------------------------------------------------------------------------------------
//
// Three classes compute the same: scores[r][n] = q[r] . k[n], later acc[r] += sum over n of weights[r][n] v[n]. `k` and
// `v` are the tile's first token of one kv head, and the next token is `stride` elements further. R <= MAX_VECTORS.
// Each class lays out the queries, once for a chunk, and the weights as its products need them.

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

// -- a job ------------------------------------------------------------------------------------------------------------

struct Chunk {
  int64_t first_token, num_tokens;  // in the layer's pool
  int64_t row_range;                // which queries attend to it
  int64_t partial;                  // where its partial results begin, in rows
};

struct RowRange {  // queries that attend to the same chunks; each row is in one range
  int64_t first_row, num_rows;
  int64_t first_chunk, num_chunks;  // 0 chunks: the rows see no key
};

struct Job {          // mirrored by CJob in job.py
  const void *k, *v;  // of layer 0, [tokens, K, D]
  const void* q;      // [T, H, D]
  void* out;          // [T, H, D]
  float* lse;         // [H, T], natural logarithm
  float* partials;    // H x (D + 2) floats for each row of each chunk
  const Chunk* chunks;
  const RowRange* row_ranges;
  int64_t num_chunks, num_row_ranges, num_rows, num_heads, num_kv_heads, head_dim, dtype;
  int64_t layer_bytes;  // of k, and of v
  double scale;

  Job of_layer(int64_t layer) const {
    Job job = *this;
    job.k = static_cast<const char*>(k) + layer * layer_bytes;
    job.v = static_cast<const char*>(v) + layer * layer_bytes;
    return job;
  }
};

// The partial result of a chunk: for each kv head and query vector, the sum of weighted values, the largest score (in
// units of log 2) and the sum of weights.
struct Partial {
  float *sums, *maxima, *totals;

  Partial(const Job& job, const Chunk& chunk, int64_t num_rows) {
    sums = job.partials + chunk.partial * job.num_heads * (job.head_dim + 2);
    maxima = sums + num_rows * job.num_heads * job.head_dim;
    totals = maxima + num_rows * job.num_heads;
  }
};

struct Worker {
  Scratch scratch;
  std::vector<uint8_t> queries;  // laid out, QUERY_BYTES for each kv head and group of vectors
};

// Adds one tile to the partial result of up to MAX_VECTORS query vectors.
template <class Tile>
void attend_tile(const uint8_t* queries, const typename Tile::Type* k, const typename Tile::Type* v, int64_t stride,
                 int num_vectors, int num_tokens, int head_dim, float scale, float* sums, float* maxima, float* totals,
                 Scratch& s) {
  Tile::score(queries, k, stride, num_vectors, num_tokens, head_dim, s);
  const int num_lanes = (num_tokens + W - 1) / W * W;
  for (int r = 0; r < num_vectors; ++r) {
    float* scores = s.scores[r];
    for (int n = num_tokens; n < num_lanes; ++n) scores[n] = NO_KEY;
    Floats highest = load(scores) * scale;
    for (int n = W; n < num_lanes; n += W) highest = max(highest, load(scores + n) * scale);
    const float maximum = maxima[r] <= largest(highest) ? largest(highest) : maxima[r];
    const float base = maximum == NO_KEY ? 0 : maximum;  // scores of -inf only: every weight is 0
    if (maximum != maxima[r]) {
      const float shrink = exp2_of(broadcast(maxima[r] - maximum))[0];
      float* its_sums = sums + r * head_dim;
      for (int d = 0; d < head_dim; d += W) store_vector(its_sums + d, load(its_sums + d) * shrink);
      totals[r] *= shrink;
      maxima[r] = maximum;
    }
    Floats total{};
    for (int n = 0; n < num_lanes; n += W)
      total += Tile::set_weights(r, n, exp2_of(load(scores + n) * scale - base), s);
    totals[r] += sum(total);
  }
  Tile::accumulate(v, stride, num_vectors, num_tokens, head_dim, sums, s);
}

// Part `i` of `num_parts` of a tile's bytes, in the order of memory, so that the hardware's own prefetching joins in.
// It keeps more reads under way than one thread's loads could.
inline void prefetch_share(const void* base, int64_t num_bytes, int64_t i, int64_t num_parts) {
  constexpr int TO_L1 = 3;  // to L2 only is a tenth slower, and without prefetching a fourth
  const char* bytes = static_cast<const char*>(base);
  for (int64_t at = num_bytes * i / num_parts; at < num_bytes * (i + 1) / num_parts; at += 64)
    __builtin_prefetch(bytes + at, 0, TO_L1);
}

// `next` is the chunk that this thread attends to afterwards, or nullptr if that is not known yet.
template <class Tile> void attend_chunk(const Job& job, const Chunk& chunk, const Chunk* next, Worker& worker) {
  using T = typename Tile::Type;
  const RowRange& range = job.row_ranges[chunk.row_range];
  const int64_t heads = job.num_heads, kv_heads = job.num_kv_heads, group = heads / kv_heads;
  const int64_t stride = kv_heads * job.head_dim;
  const int head_dim = int(job.head_dim), num_vectors = int(range.num_rows * group);
  const int num_passes = (num_vectors + MAX_VECTORS - 1) / MAX_VECTORS;
  Partial partial(job, chunk, range.num_rows);
  std::memset(partial.sums, 0, sizeof(float) * num_vectors * kv_heads * head_dim);
  for (int64_t i = 0; i < num_vectors * kv_heads; ++i) partial.maxima[i] = NO_KEY, partial.totals[i] = 0;
  worker.queries.resize(size_t(kv_heads) * num_passes * QUERY_BYTES + 64);
  uint8_t* laid_out = worker.queries.data() + 64 - reinterpret_cast<uintptr_t>(worker.queries.data()) % 64;
  const T* q = static_cast<const T*>(job.q) + range.first_row * heads * head_dim;
  T gathered[MAX_VECTORS * MAX_HEAD_DIM];
  for (int64_t head = 0; head < kv_heads; ++head)
    for (int i = 0; i < num_vectors; ++i) {
      const T* vector = q + ((i / group) * heads + head * group + i % group) * head_dim;
      std::memcpy(gathered + i % MAX_VECTORS * head_dim, vector, head_dim * sizeof(T));
      if (i % MAX_VECTORS == MAX_VECTORS - 1 || i == num_vectors - 1)
        Tile::lay_out_queries(gathered, i % MAX_VECTORS + 1, head_dim,
                              laid_out + (head * num_passes + i / MAX_VECTORS) * QUERY_BYTES);
    }
  Tile::configure(num_vectors < MAX_VECTORS ? num_vectors : MAX_VECTORS);
  const float scale = float(job.scale) * LOG2_E;
  for (int64_t n = 0; n < chunk.num_tokens; n += TILE) {
    const int64_t left = chunk.num_tokens - n, start = (chunk.first_token + n) * stride;
    const int num_tokens = int(left < TILE ? left : TILE);
    int64_t ahead = start + num_tokens * stride, tokens_ahead = left - num_tokens;  // the tile that follows
    if (tokens_ahead == 0 && next) ahead = next->first_token * stride, tokens_ahead = next->num_tokens;
    const int64_t bytes_ahead = (tokens_ahead < TILE ? tokens_ahead : TILE) * stride * sizeof(T);
    for (int64_t head = 0; head < kv_heads; ++head) {
      const T* k = static_cast<const T*>(job.k) + start + head * head_dim;
      const T* v = static_cast<const T*>(job.v) + start + head * head_dim;
      prefetch_share(static_cast<const T*>(job.k) + ahead, bytes_ahead, head, kv_heads);
      prefetch_share(static_cast<const T*>(job.v) + ahead, bytes_ahead, head, kv_heads);
      for (int pass = 0; pass < num_passes; ++pass) {
        const int first = pass * MAX_VECTORS, left_over = num_vectors - first;
        const int count = left_over < MAX_VECTORS ? left_over : MAX_VECTORS;
        const int64_t at = head * num_vectors + first;
        if (num_passes > 1) Tile::configure(count);
        attend_tile<Tile>(laid_out + (head * num_passes + pass) * QUERY_BYTES, k, v, stride, count, num_tokens,
                          head_dim, scale, partial.sums + at * head_dim, partial.maxima + at, partial.totals + at,
                          worker.scratch);
      }
    }
  }
  Tile::finish();
}

// The result of one query row and head, from all chunks of its range.
template <class Tile> void merge_chunks(const Job& job, const RowRange& range, int64_t row_in_range, int64_t head) {
  const int64_t group = job.num_heads / job.num_kv_heads, head_dim = job.head_dim;
  const int64_t vector = (head / group * range.num_rows + row_in_range) * group + head % group;
  const Chunk* chunks = job.chunks + range.first_chunk;
  float maximum = NO_KEY, total = 0;
  for (int64_t i = 0; i < range.num_chunks; ++i) {
    const float other = Partial(job, chunks[i], range.num_rows).maxima[vector];
    maximum = maximum <= other ? other : maximum;
  }
  alignas(64) float sums[MAX_HEAD_DIM] = {};
  for (int64_t i = 0; i < range.num_chunks; ++i) {
    const Partial partial(job, chunks[i], range.num_rows);
    const float weight = partial.maxima[vector] == NO_KEY ? 0 : std::exp2(partial.maxima[vector] - maximum);
    total += weight * partial.totals[vector];
    const float* from = partial.sums + vector * head_dim;
    for (int64_t d = 0; d < head_dim; d += W) store_vector(sums + d, load(sums + d) + load(from + d) * weight);
  }
  const int64_t row = range.first_row + row_in_range;
  auto out = static_cast<typename Tile::Type*>(job.out) + (row * job.num_heads + head) * head_dim;
  for (int64_t d = 0; d < head_dim; ++d) store_as(out + d, range.num_chunks ? sums[Tile::position(d)] / total : 0.0f);
  job.lse[head * job.num_rows + row] = range.num_chunks ? (maximum + std::log2(total)) * LN_2 : NO_KEY;
}

// -- threads ----------------------------------------------------------------------------------------------------------

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

// For waits that other threads end within microseconds, unless one of them has lost its cpu: then give up this one.
template <class Condition> inline void spin_until(Condition is_met) {
  for (int i = 0; !is_met(); ++i) {
    if (i < 2000) pause();
    else sched_yield();
  }
}

struct Work {
  virtual void run(int thread) = 0;  // called on every thread that is awake; returns when nothing is left to take
};

// Signals are the business of Python's threads.
inline void block_signals() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

inline void stay_on(int64_t cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof(set), &set);  // a cpu that went away in the meantime: run anywhere
}

// Threads that do one piece of work after another. Between two pieces they stay awake for a while, since the next layer
// follows soon, and then sleep. A thread that wakes too late to help is not waited for.
class Pool {
 public:
  Pool(const int64_t* cpus, int num_threads, int64_t awake_ns) : awake_ns_(awake_ns) {
    try {
      for (int i = 1; i < num_threads; ++i) {
        const int64_t cpu = cpus ? cpus[i] : -1;
        threads_.emplace_back([this, i, cpu] { serve(i, cpu); });
      }
    } catch (...) {
      stop();
      throw;
    }
  }

  ~Pool() { stop(); }

  int num_threads() const { return int(threads_.size()) + 1; }

  // The caller is thread 0. A second caller waits for its turn.
  void run(Work& work) {
    const std::lock_guard turn(one_caller_);
    work_ = &work;
    is_open_ = true;
    generation_ += 1;
    generation_.notify_all();
    work.run(0);
    is_open_ = false;
    spin_until([this] { return num_inside_ == 0; });
  }

 private:
  void stop() {
    stopping_ = true;
    generation_ += 1;
    generation_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  void serve(int thread, int64_t cpu) {
    block_signals();
    if (cpu >= 0) stay_on(cpu);
    uint32_t seen = 0;
    while (true) {
      const int64_t asleep_at = now_ns() + awake_ns_;
      while (generation_ == seen) {
        if (now_ns() > asleep_at) generation_.wait(seen);
        for (int i = 0; i < 64 && generation_ == seen; ++i) pause();
        if (generation_ == seen) sched_yield();
      }
      seen = generation_;
      if (stopping_) return;
      num_inside_ += 1;  // before it looks whether the work is open, as run() closes it before it looks who is inside
      if (is_open_) work_.load()->run(thread);
      num_inside_ -= 1;
    }
  }

  std::vector<std::thread> threads_;
  std::mutex one_caller_;
  std::atomic<uint32_t> generation_{0};
  std::atomic<int> num_inside_{0};
  std::atomic<bool> is_open_{false}, stopping_{false};
  std::atomic<Work*> work_{nullptr};
  const int64_t awake_ns_;
};

// All chunks, then all rows and heads; whoever finds no chunk left waits for those that others are still computing.
struct Attention : Work {
  const Job& job;
  std::vector<Worker>& workers;
  std::atomic<int64_t> next_chunk{0}, num_chunks_done{0}, next_unit{0}, num_units_done{0};

  Attention(const Job& job, std::vector<Worker>& workers) : job(job), workers(workers) {}

  void run(int thread) override {
    switch (job.dtype) {
#if defined(__AMX_BF16__)
      case BFLOAT16: return job.head_dim % 32 ? run_as<FloatTile<Bfloat16>>(thread) : run_as<MatrixTile>(thread);
#elif defined(__AVX512BF16__)
      case BFLOAT16: return job.head_dim % 32 ? run_as<FloatTile<Bfloat16>>(thread) : run_as<PairTile>(thread);
#else
      case BFLOAT16: return run_as<FloatTile<Bfloat16>>(thread);
#endif
      case FLOAT16: return run_as<FloatTile<Float16>>(thread);
      default: return run_as<FloatTile<float>>(thread);
    }
  }

  template <class Tile> void run_as(int thread) {
    for (int64_t i = next_chunk++, next; i < job.num_chunks; i = next, ++num_chunks_done) {
      // Knowing the next chunk early lets its first tile be prefetched. Towards the end nobody takes a chunk that
      // another thread could begin at once.
      const bool takes_early = job.num_chunks - next_chunk > 2 * int64_t(workers.size());
      if (takes_early) next = next_chunk++;
      // Others may have taken all that was left since `takes_early` was decided.
      const bool has_next = takes_early && next < job.num_chunks;
      attend_chunk<Tile>(job, job.chunks[i], has_next ? &job.chunks[next] : nullptr, workers[thread]);
      if (!takes_early) next = next_chunk++;
    }
    spin_until([this] { return num_chunks_done >= job.num_chunks; });
    const int64_t num_units = job.num_row_ranges * job.num_heads;
    for (int64_t i; (i = next_unit++) < num_units; ++num_units_done) {
      const RowRange& range = job.row_ranges[i / job.num_heads];
      for (int64_t row = 0; row < range.num_rows; ++row)
        merge_chunks<Tile>(job, range, row, i % job.num_heads);
    }
    if (thread == 0) spin_until([&] { return num_units_done >= num_units; });
  }
};

struct Reading : Work {
  const char* base;
  int64_t num_bytes;
  std::atomic<int64_t> next{0}, sum{0};

  Reading(const void* base, int64_t num_bytes) : base(static_cast<const char*>(base)), num_bytes(num_bytes) {}

  void run(int) override {
    constexpr int64_t STEP = 1 << 20;
    for (int64_t start; (start = STEP * next++) < num_bytes;) {
      Words words{};
      const int64_t end = start + STEP < num_bytes ? start + STEP : num_bytes;
      for (int64_t i = start; i + 4 * int64_t(sizeof(Words)) <= end; i += 4 * sizeof(Words))
        for (int j = 0; j < 4; ++j) words += load_vector<Words>(base + i + j * sizeof(Words));
      for (int i = 0; i < W; ++i) sum += words[i];
    }
  }
};

// -- jobs that wait for the GPU ---------------------------------------------------------------------------------------

// flags[0] is written by the GPU: the number of the newest job whose queries have arrived. flags[1] is written here:
// the number of the newest job whose output is complete. Numbers wrap around, so only their differences are compared.
class Server {
 public:
  Server(Pool& pool, std::vector<Worker>& workers, int64_t cpu, int32_t* flags)
      : pool_(pool), workers_(workers), flags_(flags), thread_([this, cpu] { serve(cpu); }) {}

  // Jobs that have not started are dropped, and whoever waits for them is let go.
  ~Server() {
    stopping_ = true;
    num_submitted_ += 1;
    num_submitted_.notify_one();
    thread_.join();
    std::atomic_ref(flags_[1]).store(int32_t(uint32_t(newest_number_) + FAR_AHEAD), std::memory_order_release);
  }

  // False: the queue is full.
  bool submit(const Job& job, int32_t number) {
    const std::lock_guard turn(one_caller_);
    const uint32_t place = num_submitted_;
    if (place - num_done_ >= CAPACITY) return false;
    queue_[place % CAPACITY] = {job, number};
    newest_number_ = number;
    num_submitted_ = place + 1;
    num_submitted_.notify_one();
    return true;
  }

 private:
  static constexpr uint32_t CAPACITY = 2048, FAR_AHEAD = 1u << 30;
  static constexpr int64_t SPIN_NS = 200'000, POLL_NS = 20'000;

  struct Entry {
    Job job;
    int32_t number;
  };

  void serve(int64_t cpu) {
    block_signals();
    if (cpu >= 0) stay_on(cpu);
    prctl(PR_SET_TIMERSLACK, 1000);  // or a short sleep takes 50 microseconds more
    for (uint32_t place = 0;; ++place) {
      num_submitted_.wait(place);
      if (stopping_) return;
      const Entry& entry = queue_[place % CAPACITY];
      if (!wait_for_queries(entry.number)) return;
      Attention attention(entry.job, workers_);
      pool_.run(attention);
      std::atomic_ref(flags_[1]).store(entry.number, std::memory_order_release);
      num_done_ = place + 1;
    }
  }

  // False: the server is to stop.
  bool wait_for_queries(int32_t number) {
    const std::atomic_ref arrived(flags_[0]);
    const int64_t spin_until = now_ns() + SPIN_NS;
    while (int32_t(uint32_t(arrived.load(std::memory_order_acquire)) - uint32_t(number)) < 0) {
      if (stopping_) return false;
      if (now_ns() < spin_until) {
        for (int i = 0; i < 8; ++i) pause();
        sched_yield();
      } else {
        const timespec time{0, POLL_NS};
        nanosleep(&time, nullptr);
      }
    }
    return true;
  }

  Pool& pool_;
  std::vector<Worker>& workers_;
  int32_t* const flags_;
  std::vector<Entry> queue_ = std::vector<Entry>(CAPACITY);
  std::mutex one_caller_;
  std::atomic<uint32_t> num_submitted_{0}, num_done_{0};
  std::atomic<bool> stopping_{false};
  int32_t newest_number_ = 0;
  std::thread thread_;  // last: it uses all of the above
};

struct Engine {
  const int64_t first_cpu;
  std::vector<Worker> workers;
  Pool pool;
  std::mutex servers_change;
  std::vector<std::unique_ptr<Server>> servers;

  Engine(const int64_t* cpus, int num_threads, int64_t awake_ns)
      : first_cpu(cpus ? cpus[0] : -1), workers(num_threads), pool(cpus, num_threads, awake_ns) {}
};

}  // namespace

// -- what Python calls (compiled.py) ----------------------------------------------------------------------------------

extern "C" {

// Tells whether this library was built from the source file that lies beside it.
uint64_t nanovllm_source_hash() { return SOURCE_HASH; }

// nullptr: the operating system refuses the instructions or the threads. `cpus`: where each thread stays, or nullptr.
void* nanovllm_open(const int64_t* cpus, int64_t num_threads, int64_t awake_ns) {
#if defined(__AMX_BF16__)
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  if (syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA)) return nullptr;
#endif
  try {
    return new Engine(cpus, int(num_threads), awake_ns);
  } catch (const std::exception&) {
    return nullptr;
  }
}

// Ends its servers first. Nobody may be inside another call.
void nanovllm_close(void* engine) { delete static_cast<Engine*>(engine); }

// Returns when the output is complete.
void nanovllm_attend(void* engine, const Job* job, int64_t layer) {
  Engine& it = *static_cast<Engine*>(engine);
  const Job of_layer = job->of_layer(layer);
  Attention attention(of_layer, it.workers);
  it.pool.run(attention);
}

// Reads every byte once, on all threads: what a kernel that does nothing else would reach.
int64_t nanovllm_read(void* engine, const void* base, int64_t num_bytes) {
  Reading reading(base, num_bytes);
  static_cast<Engine*>(engine)->pool.run(reading);
  return reading.sum;
}

// nullptr: the operating system refuses the thread.
void* nanovllm_serve(void* engine, int32_t* flags) {
  Engine& it = *static_cast<Engine*>(engine);
  const std::lock_guard turn(it.servers_change);
  try {
    it.servers.push_back(std::make_unique<Server>(it.pool, it.workers, it.first_cpu, flags));
    return it.servers.back().get();
  } catch (const std::exception&) {
    return nullptr;
  }
}

// Returns at once; 0: the queue is full. The job's struct is copied, what it points to is not.
int64_t nanovllm_submit(void* server, const Job* job, int64_t layer, int32_t number) {
  return static_cast<Server*>(server)->submit(job->of_layer(layer), number);
}

void nanovllm_end_server(void* engine, void* server) {
  Engine& it = *static_cast<Engine*>(engine);
  const std::lock_guard turn(it.servers_change);
  std::erase_if(it.servers, [server](const auto& other) { return other.get() == server; });
}
}
