// The shared segment: who writes what, and where it lies.
//
//     Header | RankBlock x n | length tables x n | staging x n | rings x n x n
//
// Everything is found by arithmetic from `n`, so that peers need to agree only on kProtocol. The
// file is sparse: pages of rings and staging cost memory from their first use on.
//
// One writer a word. A rank writes its own RankBlock, table and staging; the ring from i to j is
// filled by i and emptied by j. The exceptions are `waiters` and `sleepers` (counters of those who
// sleep on the block's words), `asked`, `attached`, and `verdict`.
//
// An OpSlot is one cache line that holds all a peer wants to know of a small operation: that it
// arrived (`tick`), what it called, and the data themselves if they fit. Slots alternate with the
// parity of the operation's number: slot s may be rewritten for operation k+2 because nobody gets
// through operation k+1 before everybody has begun it, that is, has left operation k.
#pragma once

#include <cstring>

#include "futex.h"
#include "types.h"

namespace dure {

constexpr uint64_t kMagic = 0x6472645f65727564;  // "dure_drd"
constexpr uint32_t kProtocol = 3;
constexpr int kMaxRanks = 256;
constexpr size_t kLine = 64;
constexpr size_t kPage = 4096;

constexpr size_t kInlineBytes = 32;         // payload inside an OpSlot
constexpr size_t kStageBytes = 512 * 1024;  // one staging buffer
constexpr size_t kStages = 4;               // used in turn
// How much of a buffer is used at a time where each rank has a core: what several chunks occupy
// stays in its second-level cache. Where ranks share cores meetings cost more: all of it.
constexpr size_t kSmallChunkBytes = 128 * 1024;
constexpr size_t kDirectBytes =
    16 * 1024;  // from here on it pays to look for a tensor in the arena
constexpr size_t kSiteBytes = 160;
constexpr uint32_t kNoCore = UINT32_MAX;
constexpr size_t kAnswerBytes = 512;

constexpr size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

enum class RankState : uint32_t { absent = 0, alive = 1, left = 2 };

struct alignas(128) OpSlot {
    Word tick;  // the rank's arrivals so far; futex word
    uint32_t seq;
    Op op;
    DType dtype;
    Reduction reduction;
    uint8_t even;  // 1: all block lengths are `bytes`, so that no table need be read
    int32_t root;
    uint64_t bytes;
    uint64_t arena;  // 0, or where in the arena the tensor lies: must be equal for the direct path
    std::byte inlined[kInlineBytes];
};
static_assert(offsetof(OpSlot, inlined) + kInlineBytes == kLine);

struct alignas(128) RankBlock {
    OpSlot slot[2];
    // Rarely written, so that the arriving rank finds it in its cache.
    Word waiters;   // who sleeps on slot[].tick
    Word sleepers;  // threads of this rank that sleep on `bell`
    Word cpu;       // where the rank was seen last, or kNoCore
    std::atomic<RankState> state;
    int32_t pid;
    uint64_t start_time;
    char site[2][kSiteBytes];  // where the call was made, for texts
    alignas(128) Word bell;    // rung when one of this rank's rings changed
    // See "Watcher" in watcher.h.
    alignas(128) Word life;  // the number of a thread of this rank; the kernel marks its death
    uint64_t life_link;
    Word asked;     // how often this rank was asked where it is
    Word answered;  // up to which question `answer` is the answer; 0 while it changes
    std::atomic<uint64_t> answer[kAnswerBytes / 8];
};

// Why the group is broken. `phase` goes 0 (whole), kWriting + rank of the writer, 2 (readable),
// once.
constexpr uint32_t kReadable = 2, kWriting = 16;
struct Verdict {
    Word phase;
    Status status;
    Op op;
    uint32_t seq;
    int32_t peer;
    int32_t reporter;
    uint64_t missing[kMaxRanks / 64];
    char text[16 * 1024];  // of a desync: one line a rank
};

struct Header {
    uint64_t magic;
    uint64_t nonce;
    uint32_t protocol;
    uint32_t size;
    uint32_t chunk;
    Word attached;
    alignas(128) Verdict verdict;
};

// A byte stream from one rank to another. Positions only grow; the offset is position mod capacity.
struct Ring {
    alignas(128) std::atomic<uint64_t> head;  // bytes written
    alignas(128) std::atomic<uint64_t> tail;  // bytes read
    alignas(128) std::byte data[1];
};

// Where everything lies for `n` ranks.
struct Layout {
    explicit Layout(int n)
        : size(static_cast<size_t>(n)),
          ring_bytes(n <= 8    ? 256 * 1024
                     : n <= 32 ? 64 * 1024
                               : 16 * 1024),
          ranks(round_up(sizeof(Header), kPage)),
          tables(round_up(ranks + size * sizeof(RankBlock), kPage)),
          table_stride(round_up(2 * size * sizeof(uint64_t), 128)),
          staging(round_up(tables + size * 2 * table_stride, kPage)),
          rings(staging + size * kStages * kStageBytes),
          ring_stride(round_up(offsetof(Ring, data) + ring_bytes, kPage)),
          total(rings + size * size * ring_stride) {}

    size_t size, ring_bytes;
    size_t ranks, tables, table_stride, staging, rings, ring_stride, total;
};

}  // namespace dure
