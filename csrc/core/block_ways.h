// Which blocks of collectives are staged, and which are copied once: learnt from the collectives.
//
// Note "Learnt blocks". As with messages (message_ways.h), no threshold can decide which way is
// quicker: it depends on the processor, on the operation, on how many ranks share a core, and on
// which core wrote the data last. So each channel counts the collectives of a kind (an operation
// and a length):
//
//     0 to 7      staged, so that all staging buffers are in memory
//     8 to 15     staged, the last four timed
//     16 to 23    copied once, the last four timed
//     24 on       the quicker way, until 1,024 have been counted; then from 0 on again, but
//                 the first eight go the quicker way
//
// Each way is taken several times in a row before it is timed, because what one way leaves in the
// caches slows down the other. On a rank a try lasts as long as it puts data into staging, and from
// when it has put and all ranks have begun until it is through; in all, as long as on the slowest
// rank. The way with the shorter sum is taken, its longest try left out.
//
// Ranks must take the same way without asking each other. All make the same calls on a channel, so
// their counts are equal, and the size of the cache is that of rank 0 (copy_plan.h). Each rank
// writes into the segment how long its tries lasted. In the first call of the kind after the tries
// each rank reads these times of all ranks: all that have begun that call have ended the tries.
//
// What exceeds the last cache is staged and not counted: the kernel looks up every page, and writes
// results through the cache, where staging streams them past it (copying.h).
//
// Cost: 8 of 1,024 collectives of a kind go the slower way; two readings of the clock each.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "types.h"

namespace dure {

constexpr size_t kLeastLearntBlock = 8 * 1024;  // shorter blocks are staged
constexpr size_t kBlockLengths = 12;            // powers of two; the last: all that exceed 16 MiB
constexpr size_t kBlockKinds = 5 * kBlockLengths;

// The kind of a collective whose longest block has more than kLeastLearntBlock bytes.
inline size_t block_kind(Op op, size_t longest) {
    const size_t operation = op == Op::broadcast    ? 0
                             : op == Op::all_gather ? 1
                             : op == Op::gather     ? 2
                             : op == Op::scatter    ? 3
                                                    : 4;
    const auto length = static_cast<size_t>(std::bit_width((longest - 1) / kLeastLearntBlock)) - 1;
    return operation * kBlockLengths + std::min(length, kBlockLengths - 1);
}

constexpr size_t kTimed = 4;  // tries of each way

// How long a rank's timed tries lasted, in nanoseconds: of each kind those that were staged, and
// those that were copied once.
using BlockTimes = std::atomic<float>[kBlockKinds][2][kTimed];

// What a rank has learnt on one channel. Between two calls it is the same on all ranks.
class BlockWays {
  public:
    // Whether the next collective of a kind copies once.
    bool once(size_t kind) const {
        const uint32_t number = counts_[kind] % kPeriod;
        if (number < kStagedTries || number >= kDecision) return once_[kind];
        return number >= kOnceTries;
    }

    // Count a collective of a kind, in which all ranks are; `times(r)` are the BlockTimes of rank
    // r. Returns where in its own this rank is to write how long it lasted; null for nowhere.
    template <typename Times>
    std::atomic<float>* count(size_t kind, int rank, int num_ranks, Times times) {
        const uint32_t number = counts_[kind]++ % kPeriod;
        if (number == kDecision)
            once_[kind] = sum(kind, 1, num_ranks, times) < sum(kind, 0, num_ranks, times);
        for (const uint32_t first : {kStagedTries, kOnceTries}) {
            const uint32_t timed = number - first - kUntimed;  // wraps before the first
            if (timed < kTimed) return &times(rank)[kind][first == kOnceTries][timed];
        }
        return nullptr;
    }

  private:
    static constexpr uint32_t kUntimed = 4, kPeriod = 1024;
    static constexpr uint32_t kStagedTries = 8, kOnceTries = 16, kDecision = 24;

    template <typename Times>
    static float sum(size_t kind, int way, int num_ranks, Times times) {
        float all = 0, longest = 0;
        for (size_t i = 0; i < kTimed; i++) {
            float slowest = 0;
            for (int r = 0; r < num_ranks; r++) {
                slowest = std::max(slowest, times(r)[kind][way][i].load(std::memory_order_relaxed));
            }
            all += slowest;
            longest = std::max(longest, slowest);
        }
        return all - longest;
    }

    std::array<uint32_t, kBlockKinds> counts_{};
    std::array<bool, kBlockKinds> once_{};
};

}  // namespace dure
