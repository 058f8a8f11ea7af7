/* Preloaded into the servers of the soak: the wall clock jumps when the offset in a file changes.

   SOAK_CLOCK names a file of one 64-bit number, seconds that are added to CLOCK_REALTIME. Monotonic clocks
   are left alone, as a wrong NTP server or an operator leaves them alone. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *offset_s;
static int (*real_clock)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("SOAK_CLOCK");
    real_clock = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int file = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return;
    void *page = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) offset_s = page;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (real_clock == NULL) begin();
    int failed = real_clock(clock, now);
    if (!failed && offset_s != NULL && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += *offset_s;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec fine;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &fine)) return -1;
    now->tv_sec = fine.tv_sec;
    now->tv_usec = fine.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec fine;
    clock_gettime(CLOCK_REALTIME, &fine);
    if (out != NULL) *out = fine.tv_sec;
    return fine.tv_sec;
}
