// A clock that costs a few nanoseconds to read: the processor's counter, where it runs steadily.
//
// Its unit is unknown until two of its readings have been compared with the monotonic clock, so
// ticks are kept as they are and become times when somebody looks at them.
#pragma once

#include "futex.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <x86intrin.h>
#endif

namespace dure {

// Whether the counter runs at one rate, whatever the core and its speed.
inline bool steady_counter() {
#if defined(__x86_64__)
    static const bool steady = [] {
        unsigned a = 0, b = 0, c = 0, d = 0;
        return __get_cpuid(0x80000007, &a, &b, &c, &d) != 0 && (d >> 8 & 1) != 0;
    }();
    return steady;
#else
    return false;
#endif
}

inline int64_t ticks() {
#if defined(__x86_64__)
    if (steady_counter()) return static_cast<int64_t>(__rdtsc());
#endif
    return now_ns();
}

// Both clocks at one moment.
struct ClockPair {
    int64_t ticks_now = ticks();
    int64_t ns_now = now_ns();
};

// When this process first looked; far enough back that the rate comes out exact.
inline const ClockPair& first_look() {
    static const ClockPair pair;
    return pair;
}

// Turns ticks into nanoseconds of the monotonic clock.
class TicksToTime {
  public:
    TicksToTime() {
        const ClockPair &then = first_look(), now;
        const double passed = static_cast<double>(now.ticks_now - then.ticks_now);
        if (passed > 0) rate_ = static_cast<double>(now.ns_now - then.ns_now) / passed;
    }
    int64_t ns(int64_t at) const {
        const ClockPair& then = first_look();
        return then.ns_now + static_cast<int64_t>(static_cast<double>(at - then.ticks_now) * rate_);
    }

  private:
    double rate_ = 1.0;
};

}  // namespace dure
