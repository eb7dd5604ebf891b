// The shared segment: who writes what, and where it lies.
//
//     Header | RankBlock x n | length tables x n x 2 | staging x 2 x n | rings x n x n
//
// Tables and staging belong to a channel (channel.h); there are two of them.
//
// Everything is found by arithmetic from `n`, so that peers need to agree only on kProtocol. The
// file is sparse: pages of rings and staging cost memory from their first use on, so that a channel
// which is not used costs nothing.
//
// One writer a word. A rank writes its own RankBlock, table and staging; the ring from i to j is
// filled by i and emptied by j. The exceptions are `waiters` and `sleepers` (counters of those who
// sleep on the block's words), `attached`, and `abort_record`.
//
// An OpSlot is one cache line that holds all a peer wants to know of a small operation: that it
// arrived (`tick`), what it called, and the data themselves if they fit. Slots alternate with the
// parity of the operation's number: slot s may be rewritten for operation k+2 because nobody gets
// through operation k+1 before everybody has begun it, that is, has left operation k.
#pragma once

#include <cstring>

#include "block_ways.h"
#include "copy_plan.h"
#include "futex.h"
#include "types.h"

namespace dure {

constexpr uint64_t kMagic = 0x6472645f65727564;  // "dure_drd"
constexpr uint32_t kProtocol = DURE_PROTOCOL;    // of src/dure/version.py
constexpr int kMaxRanks = 256;
constexpr int kChannels = 2;
constexpr size_t kLine = 64;
constexpr size_t kPage = 4096;

constexpr size_t kInlineBytes = 32;         // payload inside an OpSlot
constexpr size_t kStageBytes = 512 * 1024;  // one staging buffer
constexpr size_t kStages = 4;               // a rank's, used in turn
constexpr size_t kSwaps = 2;                // and those that two ranks swap (move.cpp)
constexpr size_t kBuffers = kStages + kSwaps;
// How much of a buffer is used at a time where each rank has a core: what several chunks occupy
// stays in its second-level cache. Where ranks share cores barriers cost more: all of it.
constexpr size_t kSmallChunkBytes = 128 * 1024;
// Operations that touch as much take the core lock (core_lock.h).
constexpr size_t kLargeBytes = 1024 * 1024;
// From here on it pays to look for a tensor in the symmetric heap.
constexpr size_t kZeroCopyBytes = 16 * 1024;
constexpr size_t kSiteBytes = 160;
constexpr size_t kSubjectBytes = 192;
constexpr size_t kThreadBytes = 32;
constexpr uint32_t kNoCore = UINT32_MAX;

constexpr size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

enum class RankState : uint32_t { absent = 0, alive = 1, left = 2 };

struct alignas(128) OpSlot {
    Word tick;  // the rank's arrivals so far; futex word
    uint32_t seq;
    Op op;
    DType dtype;
    Reduction reduction;
    uint8_t even;  // 1: all block lengths are `bytes`, so that no table need be read
    int32_t root;  // or what else must be equal: see `root_of` in fingerprint.cpp
    uint64_t bytes;
    uint64_t heap;  // 0, or where the tensor lies (HeapPlace)
    std::byte inlined[kInlineBytes];
    double factor;     // of a premultiplied sum
    int64_t began_ns;  // of a call with long blocks whose way is learnt (block_ways.h)
};
static_assert(offsetof(OpSlot, inlined) + kInlineBytes == kLine);

// Where in a symmetric heap a tensor lies, as one number: whose heap (a rank of the group), and the
// offset there. Never 0.
struct HeapPlace {
    static constexpr int kOffsetBits = 48;
    static uint64_t of(int owner, uint64_t offset) {
        return static_cast<uint64_t>(owner + 1) << kOffsetBits | offset;
    }
    static int owner(uint64_t place) { return static_cast<int>(place >> kOffsetBits) - 1; }
    static uint64_t offset(uint64_t place) { return place & ((uint64_t{1} << kOffsetBits) - 1); }
};

// What a rank says on one channel.
struct alignas(128) ChannelBlock {
    OpSlot slot[2];
    // Rarely written, so that the arriving rank finds it in its cache.
    Word waiters;                                         // who sleeps on slot[].tick
    std::atomic<uint64_t> site[2][kSiteBytes / 8];        // where the call was made, for texts
    std::atomic<uint64_t> thread[2][kThreadBytes / 8];    // by which thread
    std::atomic<uint64_t> subject[2][kSubjectBytes / 8];  // and what it is about
    BlockTimes block_times;                               // of its tries (block_ways.h)
};

struct alignas(128) RankBlock {
    ChannelBlock channel[kChannels];
    // Rarely written, as above.
    Word sleepers;  // threads of this rank that sleep on `bell`
    Word cpu;       // where the rank was seen last, or kNoCore
    std::atomic<RankState> state;
    int32_t pid;
    uint64_t start_time;
    uint64_t proof;               // address of a word in the rank's own memory (copy_agreement.cpp)
    int32_t heap_file;            // descriptor of its process' symmetric heap
    std::atomic<uint64_t> place;  // what its process' watcher knows it by (Watched::place)
    alignas(128) Word bell;       // rung when one of this rank's rings changed
};

// Why the group is broken. `phase` goes from 0 (whole) to kWriting + the writer's rank, and from
// there, once, to kReadable or, by whoever gives up waiting for the writer, to kGivenUp + its rank.
// So all ranks read the same, whether or not a writer that was stopped goes on.
constexpr uint32_t kReadable = 2, kWriting = 16, kGivenUp = kWriting + kMaxRanks;
struct AbortRecord {
    Word phase;
    Word threads;  // 0, or kCrossed (threads.cpp)
    Status status;
    Op op;
    int32_t channel;
    uint32_t seq;
    int32_t peer;
    int32_t reporter;
    uint64_t missing[kMaxRanks / 64];
    char text[16 * 1024];  // of a desync: one line a rank
};

// A rank on which a second thread called while the first one was inside a call: see threads.cpp.
constexpr uint32_t kCrossed = 1;
struct Crossing {
    Word claimed;  // nonzero after a rank has begun to write
    int32_t rank;
    int32_t channel;
    uint32_t number;            // of the last call on the channel before it
    char second[kThreadBytes];  // the second thread's name
    char text[1024];
};

struct Header {
    uint64_t magic;
    uint64_t nonce;
    uint32_t protocol;
    uint32_t size;
    uint32_t chunk;
    Word attached;
    alignas(128) CopyAgreement copies;
    alignas(128) AbortRecord abort_record;
    Crossing crossing;
};

// A message whose data are not in the ring: see "Rendezvous" in rendezvous.cpp.
struct Offer {
    alignas(128) Word state;
    uint64_t from;       // address in the sender's memory
    uint64_t from_heap;  // the same as HeapPlace; 0: not in a heap
};
constexpr size_t kOffers = 8;

// How a message's data come (see "Frames" in ring.cpp).
enum class Kind : uint8_t { whole, pieces, piece, offer, payload };

struct Envelope {
    uint64_t bytes;  // of the message; of a piece: its own
    int32_t tag;
    DType dtype;
    Kind kind;
    uint16_t offer;  // of the last two kinds: its place
};

// One line of a ring: it announces a message, or more of one, and has the data if they fit.
constexpr size_t kFrameBytes = 40;
struct alignas(kLine) Frame {
    Word number;  // of the frame in its ring, from 1, modulo 2^32; written last
    Envelope envelope;
    std::byte inlined[kFrameBytes];
};
static_assert(offsetof(Frame, inlined) + kFrameBytes == kLine);

// A stream from one rank to another: frames, and the data that do not fit into them. Counts only
// grow; where a frame or a byte lies is its count modulo the capacity.
struct Ring {
    alignas(128) std::atomic<uint64_t> frames_read;
    std::atomic<uint64_t> bytes_read;
    alignas(128) Word once;  // bits of the kinds of messages to copy once, set by the receiver
    Offer offers[kOffers];
    alignas(kPage) Frame frames[1];  // the data lie behind them
};

// Where everything lies for `n` ranks.
struct Layout {
    explicit Layout(int n)
        : size(static_cast<size_t>(n)),
          ring_bytes(n <= 8    ? 256 * 1024
                     : n <= 32 ? 64 * 1024
                               : 16 * 1024),
          ring_frames(ring_bytes / 128),
          ranks(round_up(sizeof(Header), kPage)),
          tables(round_up(ranks + size * sizeof(RankBlock), kPage)),
          table_stride(round_up(2 * size * sizeof(uint64_t), 128)),
          staging(round_up(tables + size * kChannels * 2 * table_stride, kPage)),
          rings(staging + size * kChannels * kBuffers * kStageBytes),
          ring_stride(offsetof(Ring, frames) + round_up(ring_frames * sizeof(Frame), kPage) +
                      ring_bytes),
          total(rings + size * size * ring_stride) {}

    size_t size, ring_bytes, ring_frames;
    size_t ranks, tables, table_stride, staging, rings, ring_stride, total;
};

}  // namespace dure
