// Checks the pool under a thread sanitizer (tests/sanitize.sh): callers at the same time, changes of its size, forks.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>

#include "pool.hpp"

namespace {

std::atomic<int> failures{0};

// Each item runs once, whatever a job costs.
void count_items(int64_t count, double nanoseconds) {
  std::vector<int> seen(static_cast<size_t>(count));
  weft::Pool::instance().for_each(count, nanoseconds, [&](int64_t item) { ++seen[static_cast<size_t>(item)]; });
  for (int times : seen) failures += times != 1;
  std::vector<int> announced(static_cast<size_t>(count) + 1);
  weft::Pool::instance().for_each_ahead(count, nanoseconds, [&](int64_t item, int64_t next) {
    ++seen[static_cast<size_t>(item)];
    if (next != weft::Pool::kNone) ++announced[static_cast<size_t>(next)];
  });
  for (int times : seen) failures += times != 2;
  for (int times : announced) failures += times > 1;
}

void call_often() {
  for (int round = 0; round < 300; ++round)
    for (int64_t count : {1, 2, 7, 100}) count_items(count, round % 3 ? 20000.0 : 100.0);
}

}  // namespace

int main() {
  weft::Pool& pool = weft::Pool::instance();
  for (int threads : {1, 2, 5}) {
    pool.resize(threads);
    call_often();
  }
  std::thread other(call_often);
  for (int round = 0; round < 40; ++round) {
    pool.resize(1 + round % 4);
    count_items(50, 20000.0);
  }
  other.join();
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    count_items(100, 20000.0);  // without workers
    if (pool.threads() != 1) ++failures;
    _exit(failures ? 1 : 0);
  }
  int status = 1;
  waitpid(child, &status, 0);
  count_items(100, 20000.0);
  if (failures || status) return 1;
  std::printf("each item was done once\n");
  return 0;
}
