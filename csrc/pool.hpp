// The worker threads of the kernels. The pool is their only owner.
//
//   caller     opens a job ---- takes items ------------------ none left: closes it, waits for workers inside
//   worker 1        comes in -- takes items -- none left: leaves
//   worker 2                                                wakes too late: the job is closed, sleeps on
//
// One atomic counter hands out items in order, several at a time, so uneven items balance by themselves. The caller
// never waits for a worker that has not begun. If the system wakes a thread late (by a millisecond on a busy machine),
// the job is done without its help. The caller states a job's cost in nanoseconds, which decides how many workers wake. A
// small job wakes none.
//
// A worker spins for a moment after a job before it sleeps, as the next kernel of a forward pass usually comes within
// microseconds. It never spins for long: an HTTP process shares the cores. (libgomp spins without end.)
//
// Jobs run one at a time: callers of different threads wait for one another. Bodies may not throw, start jobs or
// allocate. The caller of a job reserves memory (``reserve``), from which bodies take a Scratch. A forked child has no
// workers, as only the forking thread survives a fork, and computes on one thread until ``resize`` starts new ones.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

namespace weft {

// Scratch memory of one thread: it grows before jobs and never inside of one.
class Room {
 public:
  static constexpr int64_t kAlignment = 64;

  void grow(int64_t bytes);

 private:
  friend class Scratch;
  struct Free {
    void operator()(char* data) const { ::operator delete(data, std::align_val_t(kAlignment)); }
  };
  std::unique_ptr<char[], Free> data_;
  int64_t bytes_ = 0, used_ = 0;
};

// Bytes that ``count`` numbers take of a Room.
template <class T>
constexpr int64_t scratch_bytes(int64_t count) {
  return (count * static_cast<int64_t>(sizeof(T)) + Room::kAlignment - 1) / Room::kAlignment * Room::kAlignment;
}

class Pool {
 public:
  static Pool& instance();

  // Threads that work on a job, the caller included; at least 1.
  int threads() const { return worker_count_.load(std::memory_order_relaxed) + 1; }
  void resize(int threads);

  // body(item) for each item in [0, count), in any order, on any thread; returns when all are done. ``nanoseconds``:
  // approximate time of one item.
  template <class Body>
  void for_each(int64_t count, double nanoseconds, const Body& body) {
    const double whole = static_cast<double>(count) * nanoseconds;
    if (count <= 1 || threads() == 1 || whole < kWorthWaking) {
      for (int64_t item = 0; item < count; ++item) body(item);
      return;
    }
    const Call call = [](const void* context, int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) (*static_cast<const Body*>(context))(item);
    };
    run(count, nanoseconds, call, &body);
  }

  template <class Body>
  void for_each(int64_t count, const Body& body) {
    for_each(count, kWorthWaking, body);
  }

  // body(item, next): ``next`` is the item that the same thread takes after this one, kNone after the last. For items
  // that wait for memory: a body prefetches the memory of the next item while it computes.
  template <class Body>
  void for_each_ahead(int64_t count, double nanoseconds, const Body& body) {
    std::atomic<int64_t> unclaimed{0};
    const auto claim = [&] {
      const int64_t item = unclaimed.fetch_add(1, std::memory_order_relaxed);
      return item < count ? item : kNone;
    };
    const int64_t lanes = threads() < count ? threads() : count;
    for_each(lanes, nanoseconds * static_cast<double>(count) / static_cast<double>(lanes > 0 ? lanes : 1),
             [&](int64_t) {
               for (int64_t item = claim(); item != kNone;) {
                 const int64_t next = claim();
                 body(item, next);
                 item = next;
               }
             });
  }

  static constexpr int64_t kNone = -1;

  // The bodies of this thread's next job may take ``bytes`` each, on any thread. Throws std::bad_alloc.
  void reserve(int64_t bytes);

  // Room of the calling thread.
  static Room& room();

 private:
  using Call = void (*)(const void*, int64_t, int64_t);

  static constexpr double kWorthWaking = 8000;  // ns, the cost of a wake-up and of the cache contents that it evicts
  static constexpr double kTogether = 1500;     // ns, the least work that a thread takes at once

  Pool();
  ~Pool();
  void run(int64_t count, double nanoseconds, Call call, const void* context);
  void work(uint64_t seen, Room* room);
  void take_items();
  void stop();
  void forget_workers();

  std::vector<std::thread> workers_;  // changed only by ``resize``, under one_job_
  std::deque<Room> rooms_;            // of the workers, grown under one_job_
  std::atomic<int64_t> reserved_{0};
  std::atomic<int> worker_count_{0};
  std::mutex one_job_;
  std::mutex mutex_;
  std::condition_variable wake_;
  // Workers inside the job | kOpen | the number of the job, from kJob on.
  static constexpr uint64_t kInside = 0xFFFF, kOpen = 0x10000, kJob = 0x20000;
  std::atomic<uint64_t> state_{0};
  std::atomic<bool> stopping_{false};
  Call call_ = nullptr;
  const void* context_ = nullptr;
  int64_t count_ = 0, together_ = 1;
  std::atomic<int64_t> next_{0};
};

// Memory that a body takes of its thread's room, until the end of the enclosing block.
class Scratch {
 public:
  Scratch() : room_(Pool::room()), used_before_(room_.used_) {}
  ~Scratch() { room_.used_ = used_before_; }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // Numbers without values. More than the caller of the job reserved ends the process.
  template <class T>
  T* take(int64_t count) {
    char* const at = room_.data_.get() + room_.used_;
    room_.used_ += scratch_bytes<T>(count);
    if (room_.used_ > room_.bytes_) __builtin_trap();
    return reinterpret_cast<T*>(at);
  }

 private:
  Room& room_;
  int64_t used_before_;
};

}  // namespace weft
