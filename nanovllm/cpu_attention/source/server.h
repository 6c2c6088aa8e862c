// Jobs that wait for the GPU, and everything that a kernel owns.

#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <sys/prctl.h>

#include "work.h"

namespace {

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
