#include "pool.hpp"

#include <chrono>
#include <new>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace weft {
namespace {

constexpr int kSpins = 2000;  // some 20 to 60 microseconds

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

thread_local Room* room_of_worker = nullptr;

}  // namespace

void Room::grow(int64_t bytes) {
  if (bytes <= bytes_) return;
  data_.reset();
  bytes_ = 0;
  data_.reset(static_cast<char*>(::operator new(static_cast<size_t>(bytes), std::align_val_t(kAlignment))));
  bytes_ = bytes;
}

Room& Pool::room() {
  static thread_local Room of_caller;
  return room_of_worker ? *room_of_worker : of_caller;
}

void Pool::reserve(int64_t bytes) {
  room().grow(bytes);
  if (bytes <= reserved_.load(std::memory_order_relaxed)) return;
  std::lock_guard<std::mutex> job(one_job_);  // no worker is inside of a job
  for (Room& room : rooms_) room.grow(bytes);
  reserved_.store(bytes, std::memory_order_relaxed);
}

Pool& Pool::instance() {
  static Pool pool;
  return pool;
}

Pool::Pool() {
#if defined(__unix__) || defined(__APPLE__)
  // At the moment of a fork no job is half done, and no thread holds the locks.
  pthread_atfork(
      [] {
        instance().one_job_.lock();
        instance().mutex_.lock();
      },
      [] {
        instance().mutex_.unlock();
        instance().one_job_.unlock();
      },
      [] {
        instance().forget_workers();
        instance().mutex_.unlock();
        instance().one_job_.unlock();
      });
#endif
}

Pool::~Pool() { stop(); }

// In the child of a fork: the threads are missing, so their handles and the queue they slept in are constructed again.
void Pool::forget_workers() {
  new (&workers_) std::vector<std::thread>();
  worker_count_.store(0);
  rooms_.clear();
  new (&wake_) std::condition_variable();
}

void Pool::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_.store(true);
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
  workers_.clear();
  rooms_.clear();
  worker_count_.store(0);
  stopping_.store(false);
}

void Pool::resize(int threads) {
  std::lock_guard<std::mutex> job(one_job_);
  if (threads < 1) threads = 1;
  if (threads > static_cast<int>(kInside)) threads = static_cast<int>(kInside);
  if (threads == this->threads()) return;
  stop();
  const uint64_t seen = state_.load() / kJob;
  for (int i = 1; i < threads; ++i) {
    rooms_.emplace_back().grow(reserved_.load(std::memory_order_relaxed));
    workers_.emplace_back([this, seen, room = &rooms_.back()] { work(seen, room); });
  }
  worker_count_.store(threads - 1);
}

void Pool::run(int64_t count, double nanoseconds, Call call, const void* context) {
  std::lock_guard<std::mutex> job(one_job_);
  int64_t wanted = static_cast<int64_t>(static_cast<double>(count) * nanoseconds / kWorthWaking);
  const int64_t workers = static_cast<int64_t>(workers_.size());
  {
    // Under the mutex, so that a worker on its way to sleep either sees the job or is woken for it.
    std::lock_guard<std::mutex> lock(mutex_);
    call_ = call;
    context_ = context;
    count_ = count;
    together_ = 1 + static_cast<int64_t>(kTogether / (nanoseconds + 1));
    const int64_t fair = count / (4 * (workers + 1));
    if (together_ > fair) together_ = fair > 0 ? fair : 1;
    next_.store(0, std::memory_order_relaxed);
    state_.store((state_.load() / kJob + 1) * kJob | kOpen, std::memory_order_release);
  }
  if (wanted >= workers) wake_.notify_all();
  else
    for (; wanted > 0; --wanted) wake_.notify_one();
  take_items();
  state_.fetch_and(~kOpen, std::memory_order_acq_rel);
  for (int spins = 0; (state_.load(std::memory_order_acquire) & kInside) != 0; ++spins) {
    if (spins < kSpins) pause();
    else std::this_thread::yield();
  }
}

void Pool::take_items() {
  for (;;) {
    const int64_t begin = next_.fetch_add(together_, std::memory_order_relaxed);
    if (begin >= count_) return;
    call_(context_, begin, begin + together_ < count_ ? begin + together_ : count_);
  }
}

// ``seen``: the last job from before this worker; it may come into every later one.
void Pool::work(uint64_t seen, Room* room) {
  room_of_worker = room;
  for (;;) {
    for (int spins = 0; spins < kSpins && state_.load(std::memory_order_acquire) / kJob == seen; ++spins) {
      if (stopping_.load(std::memory_order_relaxed)) return;
      pause();
    }
    if (state_.load(std::memory_order_acquire) / kJob == seen) {
      std::unique_lock<std::mutex> lock(mutex_);
      // Not wait(), a symbol that is new in GCC 12's library: a wheel runs with that of GCC 11. A day without a job ends
      // in another turn of this loop.
      wake_.wait_for(lock, std::chrono::hours(24), [&] { return stopping_.load() || state_.load() / kJob != seen; });
      if (stopping_.load()) return;
    }
    uint64_t state = state_.load(std::memory_order_acquire);
    while ((state & kOpen) && !state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) {
    }
    seen = state / kJob;
    if (!(state & kOpen)) continue;
    take_items();
    state_.fetch_sub(1, std::memory_order_acq_rel);
  }
}

}  // namespace weft
