// Attention of a few query rows over keys that lie in CPU memory, with the log-sum-exp of the scores.
//
// This file, which includes all the others, is compiled once for each instruction set (build.py). What differs between
// the sets is in the tiles. Python describes a job (job.py) and calls the functions below (kernels.py). The data flows
// like this:
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
// that they round the weights to bf16. The same threads compute experts (cpu_experts/source).
//
// Legend: T query rows, H query heads, K kv heads, G = H / K query heads per kv head, D head dim.
// Legend of a tile: R query vectors of one kv head (rows x G), N tokens (TILE).

#include <atomic>

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "server.h"

extern "C" {

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

// Returns when the output of the job's tokens in the layer is complete.
void nanovllm_compute_experts(void* engine, const ExpertJob* job, int64_t layer) {
  Engine& it = *static_cast<Engine*>(engine);
  run_experts(job->of_layer(layer), it.pool);
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

// The job's struct is copied, what it points to is not. nullptr: the operating system refuses the thread.
void* nanovllm_serve_experts(void* engine, const ExpertJob* job, int32_t* exchange) {
  Engine& it = *static_cast<Engine*>(engine);
  const std::lock_guard turn(it.servers_change);
  try {
    it.expert_servers.push_back(std::make_unique<ExpertServer>(it.pool, *job, it.first_cpu, exchange));
    return it.expert_servers.back().get();
  } catch (const std::exception&) {
    return nullptr;
  }
}

void nanovllm_end_expert_server(void* engine, void* server) {
  Engine& it = *static_cast<Engine*>(engine);
  const std::lock_guard turn(it.servers_change);
  std::erase_if(it.expert_servers, [server](const auto& other) { return other.get() == server; });
}

void nanovllm_end_server(void* engine, void* server) {
  Engine& it = *static_cast<Engine*>(engine);
  const std::lock_guard turn(it.servers_change);
  std::erase_if(it.servers, [server](const auto& other) { return other.get() == server; });
}
}
