// What the ranks of a group have agreed on about copies: see copy_agreement.cpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "futex.h"

namespace dure {

constexpr uint64_t kNeverCopiedOnce = UINT64_MAX;
// What the caller of a group asks for: to learn which way is quicker, or never to copy once; or
// from how many bytes on to copy once, as a number.
constexpr int64_t kLearnCopies = -1, kNoSingleCopies = -2;

// Equal on all ranks of a group.
struct CopyPlan {
    uint64_t host = 0;       // nonce of the group that found out what is permitted; 0: none has
    uint32_t permitted = 0;  // 1: every rank may read every other's memory
    uint32_t learns = 0;     // 1: which way is quicker is learnt (message_ways.h, block_ways.h)
    uint64_t once_bytes = kNeverCopiedOnce;  // else: from which length on all is copied once
    uint64_t cache_bytes = 0;  // what rank 0's last cache holds; collectives that exceed it: staged
};

// The part of the segment's header through which the ranks of a group agree.
struct CopyAgreement {
    CopyPlan plan;
    uint32_t known = 0;  // 1: `plan` came from an earlier group of these ranks, if
    Word strangers;      // this counts none: ranks that were not in it
    Word denied;         // ranks that may not copy
};

// Fill in what is not found out, as `asked`: bytes, or one of the constants above.
void choose_copies(CopyPlan& plan, int64_t asked);

}  // namespace dure
