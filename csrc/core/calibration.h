// Which way of copying is the quicker one on this host, found out by trying.
//
// Note "Calibration". Cores that share a cache hand a line over in 0.04 us, distant ones (dies,
// sockets) in 0.2 us; that decides whether staging or a single copy (single_copy.h) is quicker, and
// from how many bytes on. So two ranks of a host's first group, which are processes, spend some
// milliseconds on it: a line sent there and back; then messages, and blocks that both exchange, of
// two lengths in both ways. A try lasts from when the first side went off until both are through;
// the quickest of several counts, so that a disturbance counts only if it lasts. Time is taken to
// grow as a + b B with the length; where the two ways' lines cross is the threshold.
//
// Where n ranks read the same block, staging moves it n times, single copies n - 1 times; so the
// more ranks, the more a single copy must gain. What n ranks read each from each is moved twice or
// once, however many they are.
//
// Rank 0 tells the others through the segment's header, so that all ranks of a group take the same
// way. A process keeps what it has learned for the groups that it makes later; a group all of whose
// ranks were together in an earlier one is spared the exchange altogether (Group::agree_on_copies).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "futex.h"
#include "single_copy.h"

namespace dure {

constexpr uint64_t kNeverCopiedOnce = UINT64_MAX;
// What the caller of a group asks for: measure, or from how many bytes on to copy once.
constexpr int64_t kMeasureCopies = -1, kNoSingleCopies = -2;

// The microseconds that one way took for two lengths.
struct CopyTimes {
    float short_us = 0, long_us = 0;
};
constexpr size_t kShortTrial = 32 * 1024, kLongTrial = 512 * 1024;

// What a group knows of copies; equal on all its ranks.
struct CopyPlan {
    uint64_t host = 0;       // nonce of the group that found it out; 0: nobody has
    uint32_t permitted = 0;  // 1: every rank may copy from and to every other's memory
    uint32_t measured = 0;
    float line_us = 0;  // a cache line's way from core to core
    CopyTimes staged_message, single_message, staged_exchange, single_exchange;
    // From this length on messages are copied once, if that is not learnt, and what one rank of
    // two broadcasts.
    uint64_t message_bytes = kNeverCopiedOnce;
    // Blocks of collectives: one for all (broadcast, all_gather, gather), one for each (the
    // others).
    uint64_t shared_bytes = kNeverCopiedOnce, block_bytes = kNeverCopiedOnce;
    // 1: the thresholds were not asked for, and what exceeds the cache is staged (move.cpp).
    uint32_t within_cache = 0;
    uint32_t learns = 0;  // 1: nor for messages, whose way is learnt instead (message_ways.h)
};

// Memory of the segment that two processes measure with.
struct CopyTrial {
    alignas(128) Word turn[2][32];     // each side's count, on lines of their own
    alignas(128) uint64_t address[2];  // of each side's private memory
    alignas(128) int64_t began_ns[2];  // when each side went off
};

// What the ranks of a group tell each other of it, in the segment's header.
struct CopyAgreement {
    CopyPlan plan;
    uint32_t known = 0;  // 1: `plan` came from an earlier group of these ranks, if
    Word strangers;      // this counts none: ranks that were not in it
    Word denied;         // ranks that may not copy
    CopyTrial trial;
};

// One side of the measurement: `side` is 0 or 1, `stages` are the two sides' staging memory, of at
// least kLongTrial bytes. Both sides call it at the same time, and both return the same way within
// 100 ms. Fills in the times; false where that failed, or the two were kept from their cores.
bool measure_copies(CopyTrial& trial, int side, int peer_pid, std::byte* const stages[2],
                    CopyPlan& plan);

// Fill in the thresholds: measured, or as `asked` (bytes, or one of the constants above).
void choose_copies(CopyPlan& plan, int64_t asked, int num_ranks);

}  // namespace dure
