// The threads.

#pragma once

#include <atomic>
#include <cstdint>
#include <ctime>
#include <thread>
#include <vector>

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <immintrin.h>

namespace {

inline void pause() { _mm_pause(); }

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

}  // namespace
