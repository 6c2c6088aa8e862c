// A thread that computes experts as soon as the GPU has written what a layer needs. The host submits nothing: the GPU
// writes which layer it is, and for how many tokens.

#pragma once

#include <atomic>
#include <thread>

#include <sys/prctl.h>

#include "experts.h"

namespace {

// Returns when the output is complete.
inline void run_experts(const ExpertJob& job, Pool& pool) {
  Mixture mixture(job, pool.num_threads());
  pool.run(mixture);
}

// Fields of the memory that GPU and CPU share, mirrored by the constants in job.py. The GPU writes LAYER and NUM_TOKENS
// and then raises ARRIVED by one. The thread sets DONE to the same number when the output is complete. Numbers wrap
// around, so only their differences are compared.
enum Exchange { ARRIVED = 0, LAYER = 1, NUM_TOKENS = 2, DONE = 16 };

class ExpertServer {
 public:
  ExpertServer(Pool& pool, const ExpertJob& job, int64_t cpu, int32_t* exchange)
      : pool_(pool), job_(job), exchange_(exchange), thread_([this, cpu] { serve(cpu); }) {}

  // Layers that have not started are dropped, and whoever waits for them is let go.
  ~ExpertServer() {
    stopping_ = true;
    thread_.join();
    std::atomic_ref(exchange_[DONE]).store(int32_t(number_ + FAR_AHEAD), std::memory_order_release);
  }

 private:
  static constexpr uint32_t FAR_AHEAD = 1u << 30;
  // The next layer of a step follows within SPIN_NS, the next step of a busy engine within BUSY_NS.
  static constexpr int64_t SPIN_NS = 1'000'000, BUSY_NS = 100'000'000, BUSY_POLL_NS = 20'000, IDLE_POLL_NS = 500'000;

  void serve(int64_t cpu) {
    block_signals();
    if (cpu >= 0) stay_on(cpu);
    prctl(PR_SET_TIMERSLACK, 1000);  // or a short sleep takes 50 microseconds more
    while (wait_for_tokens()) {
      ExpertJob job = job_.of_layer(exchange_[LAYER]);
      job.num_tokens = exchange_[NUM_TOKENS];
      run_experts(job, pool_);
      number_ += 1;
      std::atomic_ref(exchange_[DONE]).store(int32_t(number_), std::memory_order_release);
    }
  }

  // False: the server is to stop.
  bool wait_for_tokens() {
    const std::atomic_ref arrived(exchange_[ARRIVED]);
    const int64_t since = now_ns();
    while (uint32_t(arrived.load(std::memory_order_acquire)) == number_) {
      if (stopping_) return false;
      const int64_t waited = now_ns() - since;
      if (waited < SPIN_NS) {
        for (int i = 0; i < 8; ++i) pause();
        sched_yield();
      } else {
        const timespec time{0, waited < BUSY_NS ? BUSY_POLL_NS : IDLE_POLL_NS};
        nanosleep(&time, nullptr);
      }
    }
    return !stopping_;
  }

  Pool& pool_;
  const ExpertJob job_;
  int32_t* const exchange_;
  uint32_t number_ = 0;  // layers that are done
  std::atomic<bool> stopping_{false};
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace
