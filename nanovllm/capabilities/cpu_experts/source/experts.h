// The experts of one layer that are in CPU memory: sums over each token's chosen experts of
// weight * down(activation(gate(x)) * up(x)).
//
//   routing   Before the threads begin, the pairs of a token and a chosen expert are sorted by expert, and x is
//             converted to fp32 if a format needs it. Pairs of an expert that is not in CPU memory are dropped.
//   tiles     With the matrix unit (AMX), the rows of x that share an expert are laid out for it.
//   hidden    The threads take units of HIDDEN_ROWS rows of an expert's gate and up, and multiply them by all of the
//             expert's tokens, so that each weight is read once.
//   output    When all hidden values are there, the threads take units of OUTPUT_ROWS rows of the downs of all chosen
//             experts. So each value of the output is summed by one thread, in the order of the experts.
//
// Gate, up, activation and their product are rounded to the model's dtype, as on the GPU. The other sums are fp32.
//
// Legend: T tokens, C chosen experts of a token, P <= T * C pairs, H hidden size, I features of an expert.

#pragma once

#include <algorithm>
#include <atomic>

#include "../../cpu_attention/source/pool.h"
#include "tile_products.h"

namespace {

constexpr int HIDDEN_ROWS = 32, OUTPUT_ROWS = 16;
constexpr float SWIGLU_ALPHA = 1.702f, SWIGLU_LIMIT = 7.0f;

#if defined(__AMX_BF16__)
constexpr bool HAS_MATRIX_UNIT = true;
constexpr int MAX_SHARING = MAX_TILE_TOKENS;  // pairs of an expert that share one reading of its weights
constexpr int LEAST_TILE_TOKENS = 3;  // with fewer tokens products of pairs are faster
#else
constexpr bool HAS_MATRIX_UNIT = false;
constexpr int MAX_SHARING = 64;
constexpr int LEAST_TILE_TOKENS = MAX_SHARING + 1;
class MatrixUnit {};
#endif

struct ExpertLayer {  // mirrored by CExpertLayer in job.py
  Matrix gate, up, down;
  const int32_t* places;  // of each expert of the layer, in the matrices; -1: not in CPU memory
};

struct ExpertJob {  // mirrored by CExpertJob in job.py
  const ExpertLayer* layers;
  const void* x;           // [T, H]
  const int32_t* experts;  // [T, C]
  const float* weights;    // [T, C]
  void* out;               // [T, H]
  uint8_t* scratch;
  int64_t num_tokens, num_chosen, hidden_size, size, num_experts, num_places, dtype, out_dtype, activation;

  ExpertJob of_layer(int64_t layer) const {
    ExpertJob job = *this;
    job.layers += layer;
    return job;
  }
};

inline Floats round_to(Floats values, int64_t dtype) {
  if (dtype == BFLOAT16) {  // to nearest even
    const Words bits = bits_of<Words>(values);
    return bits_of<Floats>((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000);
  }
  if (dtype == FLOAT16) {
#if defined(__AVX512F__)
    return Floats(_mm512_cvtph_ps(_mm512_cvtps_ph(__m512(values), _MM_FROUND_TO_NEAREST_INT)));
#else
    return Floats(_mm256_cvtph_ps(_mm256_cvtps_ph(__m256(values), _MM_FROUND_TO_NEAREST_INT)));
#endif
  }
  return values;
}

inline void store_as(void* to, int64_t i, int64_t dtype, float value) {
  switch (dtype) {
    case BFLOAT16: return store_as(static_cast<Bfloat16*>(to) + i, value);
    case FLOAT16: return store_as(static_cast<Float16*>(to) + i, value);
    default: static_cast<float*>(to)[i] = value;
  }
}

inline Floats load_as(const void* from, int64_t i, int64_t dtype) {
  switch (dtype) {
    case BFLOAT16: return load(static_cast<const Bfloat16*>(from) + i);
    case FLOAT16: return load(static_cast<const Float16*>(from) + i);
    default: return load(static_cast<const float*>(from) + i);
  }
}

enum Activation : int64_t { SILU, GELU_TANH, CLAMPED_SWIGLU };

// x / (1 + e^-z), where z is x for SiLU. For GELU z is 2 sqrt(2 / pi) (x + 0.044715 x^3), for the clamped SwiGLU it is
// SWIGLU_ALPHA x.
inline Floats activate(Floats x, int64_t activation) {
  const Floats z = activation == GELU_TANH        ? 1.5957691216057308f * (x + 0.044715f * x * x * x)
                   : activation == CLAMPED_SWIGLU ? SWIGLU_ALPHA * x
                                                  : x;
  const Floats magnitude = max(z, -z);
  const Floats small = exp2_of(magnitude * -LOG2_E);  // e^-|z|
  const Floats one = broadcast(1.0f);
  return x * (z < 0 ? small : one) / (one + small);
}

inline Floats min(Floats a, Floats b) { return -max(-a, -b); }

// The products of `count` values with their biases, if there are any.
inline Floats with_bias(const float* products, const float* biases, int v) {
  const Floats values = load(products + v);
  return biases ? values + load(biases + v) : values;
}

inline bool has_least(const Matrix& matrix) {
  return matrix.type == Q4_1 || matrix.type == Q5_1 || matrix.type == Q4_K || matrix.type == Q5_K;
}

#if defined(__AVX512BF16__)
constexpr bool MULTIPLIES_PAIRS = true;
#else
constexpr bool MULTIPLIES_PAIRS = false;
#endif

// The parts of a job's scratch memory. The size is scratch_bytes in job.py.
struct Parts {
  uint8_t* free;
  template <class T> T* take(int64_t count) {
    T* part = reinterpret_cast<T*>(free);
    free += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
    return part;
  }
};

struct Mixture : Work {
  const ExpertJob& job;
  const ExpertLayer& layer;
  const int64_t num_threads;
  float *x_floats, *x_sums, *hidden_floats, *hidden_sums, *sums;
  float* x_tile_sums;
  Bfloat16 *hidden_pairs, *x_tiles;
  int32_t *tokens, *choices, *rows, *starts, *groups;  // of the sorted pairs; first pair and place of each group
  int64_t num_pairs = 0, num_groups = 0, num_tile_units = 0, num_hidden_units = 0;
  std::atomic<int64_t> next_tiles{0}, num_tiles_done{0};
  std::atomic<int64_t> next_hidden{0}, num_hidden_done{0}, next_output{0}, num_outputs_done{0};

  Mixture(const ExpertJob& job, int64_t num_threads) : job(job), layer(*job.layers), num_threads(num_threads) {
    const int64_t t = job.num_tokens, p = t * job.num_chosen, h = job.hidden_size, i = job.size;
    Parts parts{job.scratch};
    x_floats = parts.take<float>(t * h);
    x_sums = parts.take<float>(t * h / SLICE);
    sums = parts.take<float>(t * h);
    hidden_floats = parts.take<float>(p * i);
    hidden_pairs = parts.take<Bfloat16>(p * i);
    hidden_sums = parts.take<float>(p * i / SLICE);
    x_tiles = parts.take<Bfloat16>(p * h);
    x_tile_sums = parts.take<float>(p * h / SLICE);
    tokens = parts.take<int32_t>(p);
    choices = parts.take<int32_t>(p);
    rows = parts.take<int32_t>(p);
    groups = parts.take<int32_t>(p);
    starts = parts.take<int32_t>(job.num_places + 1);
    sort_pairs();
    convert_x();
    num_hidden_units = num_groups * (i / HIDDEN_ROWS);
    const int64_t most = num_pairs - num_groups + 1;  // pairs of a group, at most
    if (uses_tiles(layer.gate, most) || uses_tiles(layer.up, most)) num_tile_units = num_groups;
  }

  int64_t place_of(int64_t pair) const {
    const uint32_t expert = uint32_t(job.experts[pair]);
    return expert < uint64_t(job.num_experts) ? layer.places[expert] : -1;
  }

  // Counts the pairs of each place, and then gives each pair the next position of its place.
  void sort_pairs() {
    std::memset(starts, 0, sizeof(int32_t) * (job.num_places + 1));
    const int64_t total = job.num_tokens * job.num_chosen;
    for (int64_t pair = 0; pair < total; ++pair)
      if (const int64_t place = place_of(pair); place >= 0) starts[place] += 1, ++num_pairs;
    int32_t end = 0;
    for (int64_t place = 0; place < job.num_places; ++place) {
      const int32_t count = starts[place];
      starts[place] = end;
      if (count) {
        groups[num_groups++] = int32_t(place);
        end += count;
      }
    }
    for (int64_t pair = 0; pair < total; ++pair)
      if (const int64_t place = place_of(pair); place >= 0) {
        const int32_t position = starts[place]++;
        tokens[position] = int32_t(pair / job.num_chosen);
        choices[position] = int32_t(pair);
        rows[position] = position;
      }
  }

  // After the sorting, the entry of each place is the end of its pairs.
  int64_t end_of(int64_t group) const { return starts[groups[group]]; }
  int64_t start_of(int64_t group) const { return group ? end_of(group - 1) : 0; }

  bool uses_pairs(const Matrix& matrix) const { return MULTIPLIES_PAIRS && job.dtype == BFLOAT16 && has_pairs(matrix); }

  // Whether the matrix unit multiplies the matrix with `count` tokens of an expert, which are then laid out for it.
  bool uses_tiles(const Matrix& matrix, int64_t count) const {
    return HAS_MATRIX_UNIT && uses_pairs(matrix) && count >= LEAST_TILE_TOKENS;
  }

  void convert_x() {
    const int64_t count = job.num_tokens * job.hidden_size;
    if (!uses_pairs(layer.gate) || !uses_pairs(layer.up))
      for (int64_t i = 0; i < count; i += W) store_vector(x_floats + i, load_as(job.x, i, job.dtype));
    if (has_least(layer.gate) || has_least(layer.up))
      for (int64_t i = 0; i < count; i += SLICE) {
        Floats total{};
        for (int v = 0; v < SLICE; v += W) total += load_as(job.x, i + v, job.dtype);
        x_sums[i / SLICE] = sum(total);
      }
  }

  Activations inputs_of(const Matrix& matrix) const {
    return {x_floats, uses_pairs(matrix) ? static_cast<const Bfloat16*>(job.x) : nullptr, x_sums, job.hidden_size};
  }

  int64_t num_output_units() const { return job.hidden_size / OUTPUT_ROWS; }

  void run(int thread) override {
    MatrixUnit unit;
    run_units(next_tiles, num_tiles_done, num_tile_units, [&](int64_t group, int64_t) { lay_out_tiles(group); });
    spin_until([this] { return num_tiles_done >= num_tile_units; });
    run_units(next_hidden, num_hidden_done, num_hidden_units, [&](auto... units) { compute_hidden(unit, units...); });
    spin_until([this] { return num_hidden_done >= num_hidden_units; });
    run_units(next_output, num_outputs_done, num_output_units(), [&](auto... units) {
      compute_output(unit, units...);
    });
    if (thread == 0) spin_until([this] { return num_outputs_done >= num_output_units(); });
  }

  // Calls compute(unit, the unit that this thread computes afterwards or -1) for units that no other thread has taken.
  // A unit is taken early, so that its memory can be prefetched, unless another thread could begin it at once.
  template <class Compute>
  void run_units(std::atomic<int64_t>& next, std::atomic<int64_t>& num_done, int64_t num_units, Compute compute) {
    for (int64_t unit = next++, following; unit < num_units; unit = following, ++num_done) {
      const bool takes_early = num_units - next > 2 * num_threads;
      if (takes_early) following = next++;
      compute(unit, takes_early && following < num_units ? following : -1);
      if (!takes_early) following = next++;
    }
  }

  Piece hidden_piece(const Matrix& matrix, int64_t unit) const {
    if (unit < 0) return {};
    const int64_t units_of_group = job.size / HIDDEN_ROWS;
    const int64_t row = groups[unit / units_of_group] * job.size + unit % units_of_group * HIDDEN_ROWS;
    return {&matrix, row, HIDDEN_ROWS};
  }

  // Calls body(first pair, number of pairs) for pairs of a group that share a reading of the weights.
  template <class Body> void for_shares(int64_t group, Body body) {
    for (int64_t first = start_of(group), end = end_of(group); first < end; first += MAX_SHARING)
      body(first, std::min<int64_t>(end - first, MAX_SHARING));
  }

  void lay_out_tiles([[maybe_unused]] int64_t group) {
#if defined(__AMX_BF16__)
    for_shares(group, [&](int64_t first, int64_t count) {
      if (count < LEAST_TILE_TOKENS) return;
      const int64_t h = job.hidden_size;
      lay_out_pairs(x_tiles + first * h, h, int(count), [&](int i, int64_t pair) {
        return load_vector<Words>(static_cast<const Bfloat16*>(job.x) + tokens[first + i] * h + 2 * pair);
      });
      const int64_t num_slices = h / SLICE;
      for (int64_t s = 0; s < num_slices; ++s)
        for (int64_t i = 0; i < count; ++i)
          x_tile_sums[first * num_slices + s * count + i] = x_sums[tokens[first + i] * num_slices + s];
    });
#endif
  }

  template <int NUM_ROWS>
  void multiply_x([[maybe_unused]] MatrixUnit& unit, const Piece& piece, const Piece& next, int64_t first,
                  int64_t count, float* products) {
    const Matrix& matrix = *piece.matrix;
#if defined(__AMX_BF16__)
    if (uses_tiles(matrix, count)) {
      const int64_t h = job.hidden_size;
      const TokenTiles x{x_tiles + first * h, x_tile_sums + first * h / SLICE, int(count)};
      return multiply_tiles(unit, piece, next, x, products);
    }
#endif
    multiply<NUM_ROWS>(piece, next, inputs_of(matrix), tokens + first, count, products);
  }

  template <int NUM_ROWS>
  void multiply_hidden([[maybe_unused]] MatrixUnit& unit, const Piece& piece, const Piece& next, int64_t first,
                       int64_t count, float* products) {
#if defined(__AMX_BF16__)
    if (uses_tiles(layer.down, count)) {
      const TokenTiles hidden{hidden_pairs + first * job.size, hidden_sums + first * job.size / SLICE, int(count)};
      return multiply_tiles(unit, piece, next, hidden, products);
    }
#endif
    const Activations hidden{hidden_floats, uses_pairs(layer.down) ? hidden_pairs : nullptr, hidden_sums, job.size};
    multiply<NUM_ROWS>(piece, next, hidden, rows + first, count, products);
  }

  void compute_hidden(MatrixUnit& matrix_unit, int64_t unit, int64_t following) {
    const int64_t units_of_group = job.size / HIDDEN_ROWS;
    const int64_t feature = unit % units_of_group * HIDDEN_ROWS;
    const Piece gate = hidden_piece(layer.gate, unit), up = hidden_piece(layer.up, unit);
    const Piece next = hidden_piece(layer.gate, following);
    float gates[MAX_SHARING * HIDDEN_ROWS], ups[MAX_SHARING * HIDDEN_ROWS];
    for_shares(unit / units_of_group, [&](int64_t first, int64_t count) {
      multiply_x<HIDDEN_ROWS>(matrix_unit, gate, up, first, count, gates);
      multiply_x<HIDDEN_ROWS>(matrix_unit, up, next, first, count, ups);
      for (int64_t i = 0; i < count; ++i)
        store_hidden(gates + i * HIDDEN_ROWS, ups + i * HIDDEN_ROWS, gate.biases(), up.biases(), first, i, count,
                     feature);
    });
  }

  // act_and_mul in layers/linear.py
  Floats gated(Floats gate, Floats up) const {
    gate = round_to(gate, job.dtype), up = round_to(up, job.dtype);
    if (job.activation != CLAMPED_SWIGLU)
      return round_to(round_to(activate(gate, job.activation), job.dtype) * up, job.dtype);
    const Floats limit = broadcast(SWIGLU_LIMIT);
    gate = min(gate, limit), up = max(min(up, limit), -limit);
    return round_to(activate(gate, CLAMPED_SWIGLU) * (up + broadcast(1.0f)), job.dtype);
  }

  // Of pair first + i, where `count` pairs share tiles.
  void store_hidden(const float* gate, const float* up, const float* gate_biases, const float* up_biases,
                    int64_t first, int64_t i, int64_t count, int64_t feature) {
    const int64_t row = (first + i) * job.size + feature;
    const bool in_tiles = uses_tiles(layer.down, count);
    uint32_t* pairs = reinterpret_cast<uint32_t*>(hidden_pairs);
    pairs += in_tiles ? (first * job.size + feature * count) / 2 + i : row / 2;
    const int64_t pair_stride = in_tiles ? count : 1;
    Floats total{};
    for (int v = 0; v < HIDDEN_ROWS; v += W) {
      const Floats hidden = gated(with_bias(gate, gate_biases, v), with_bias(up, up_biases, v));
      total += hidden;
      if (!uses_pairs(layer.down)) {
        store_vector(hidden_floats + row + v, hidden);
      } else {
        const Words bits = bits_of<Words>(hidden);
        for (int p = 0; p < W / 2; ++p) pairs[(v / 2 + p) * pair_stride] = bits[2 * p] >> 16 | bits[2 * p + 1];
      }
    }
    hidden_sums[in_tiles ? (first * job.size + feature * count) / SLICE + i : row / SLICE] = sum(total);
  }

  Piece output_piece(int64_t group, int64_t unit) const {
    if (unit < 0) return {};
    return {&layer.down, groups[group] * job.hidden_size + unit * OUTPUT_ROWS, OUTPUT_ROWS};
  }

  void compute_output(MatrixUnit& matrix_unit, int64_t unit, int64_t following) {
    const int64_t h = job.hidden_size, column = unit * OUTPUT_ROWS;
    for (int64_t t = 0; t < job.num_tokens; ++t) std::fill_n(sums + t * h + column, OUTPUT_ROWS, 0.0f);
    float products[MAX_SHARING * OUTPUT_ROWS];
    for (int64_t group = 0; group < num_groups; ++group) {
      const Piece down = output_piece(group, unit);
      const Piece next = group + 1 < num_groups ? output_piece(group + 1, unit) : output_piece(0, following);
      for_shares(group, [&](int64_t first, int64_t count) {
        multiply_hidden<OUTPUT_ROWS>(matrix_unit, down, next, first, count, products);
        for (int64_t i = 0; i < count; ++i) {
          float* to = sums + tokens[first + i] * h + column;
          const float weight = job.weights[choices[first + i]];
          for (int v = 0; v < OUTPUT_ROWS; v += W)
            store_vector(to + v, load(to + v) + with_bias(products + i * OUTPUT_ROWS, down.biases(), v) * weight);
        }
      });
    }
    for (int64_t t = 0; t < job.num_tokens; ++t)
      for (int r = 0; r < OUTPUT_ROWS; ++r)
        store_as(job.out, t * h + column + r, job.out_dtype, sums[t * h + column + r]);
  }
};

}  // namespace
