// What the threads do together: attend, or for benchmarks only read.

#pragma once

#include <atomic>
#include <vector>

#include "job.h"
#include "pool.h"

namespace {

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

}  // namespace
