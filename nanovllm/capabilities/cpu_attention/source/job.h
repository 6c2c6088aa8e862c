// A job: the attention of one layer. Its chunks, their partial results, and the merge of these.

#pragma once

#include <cstring>
#include <vector>

#include "tiles.h"

namespace {

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

}  // namespace
