// Words by which one rank tells another something: who waits for a value changes it to the next.
#pragma once

#include "futex.h"

namespace dure {

// If `word` is `from`, make it `to` and wake who waits for that: what was written before is seen by
// who changes it next.
inline bool change(Word& word, uint32_t from, uint32_t to) {
    if (!word.compare_exchange_strong(from, to)) return false;
    futex_wake_all(word);
    return true;
}

// Wait until `word` is `from`, and make it `to`: 0. After each nap `why_not` is asked whether there
// is a reason to give up, a number that is not 0, which is then returned.
template <typename F>
int await_change(Word& word, uint32_t from, uint32_t to, F why_not) {
    constexpr int kLooks = 2000;
    constexpr int64_t kNapNs = 4'000'000;
    for (int i = 0; i < kLooks; i++) {
        if (change(word, from, to)) return 0;
        relax();
    }
    for (;;) {
        const uint32_t seen = word.load();
        if (seen != from) futex_wait(word, seen, kNapNs);
        if (change(word, from, to)) return 0;
        const int reason = why_not();
        if (reason != 0) return change(word, from, to) ? 0 : reason;
    }
}

}  // namespace dure
