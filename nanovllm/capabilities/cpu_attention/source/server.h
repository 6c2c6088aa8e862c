// What the threads do together besides experts (attend, or for benchmarks only read), jobs that wait for the GPU, and
// everything that a kernel owns.

#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <sys/prctl.h>

#include "../../cpu_experts/source/server.h"
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
  std::vector<std::unique_ptr<ExpertServer>> expert_servers;

  Engine(const int64_t* cpus, int num_threads, int64_t awake_ns)
      : first_cpu(cpus ? cpus[0] : -1), workers(num_threads), pool(cpus, num_threads, awake_ns) {}
};

}  // namespace
