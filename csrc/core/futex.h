// Sleeping on a word of memory, telling time, and hints to the processor.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace dure {

using Word = std::atomic<uint32_t>;
static_assert(sizeof(Word) == 4 && Word::is_always_lock_free);

inline int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * int64_t{1000000000} + t.tv_nsec;
}

// Sleep while `word` holds `seen`, at most `ns`. Wakes for no reason are allowed.
inline void futex_wait(Word& word, uint32_t seen, int64_t ns) {
    timespec t{ns / 1000000000, ns % 1000000000};
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &t, nullptr, 0);
}

inline void futex_wake_all(Word& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Fetch the line at `address` to write to it soon, without waiting for it.
inline void fetch_to_write(const void* address) {
#if defined(__x86_64__)
    // Without -mprfchw, the builtin fetches to read. A processor that lacks it does nothing.
    asm volatile("prefetchw %0" ::"m"(*static_cast<const char*>(address)));
#else
    __builtin_prefetch(address, 1);
#endif
}

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace dure
