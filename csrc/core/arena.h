// Tensors that all ranks can reach.
//
// Note "Arena". `shared_empty` is a collective: rank 0 makes a memory file with one region a rank,
// all map it, and each rank's tensor is its own region. A reduction of tensors that lie at the same
// place of the same file on all ranks needs no staging: each rank reads its slice of all regions
// and writes the result to all (all_reduce.cpp, "direct"). Operations that move blocks read them
// where they lie (move.cpp, "Direct").
//
// A *common* block (`host_shared_empty`) is a file with one region, which is every rank's: its
// distance from rank to rank is 0. What one rank writes, all read. Collectives take it for n equal
// tensors, one a rank: a broadcast finds the values in place, a reduction counts them n times. An
// operation that would leave a different result on each rank has no meaning on it.
//
// A file is known by a number that is equal on all ranks, as all allocate in the same order.
// Freeing is local: a rank that has dropped its tensor no longer finds it in its own table, so its
// calls say "ordinary tensor", and the operation is staged on all ranks.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "segment.h"

namespace dure {

class Arena;

// This rank's view of one file.
struct SharedBlock {
    std::shared_ptr<Mapping> mapping;
    uint32_t id;
    size_t bytes;   // usable, of each region
    size_t stride;  // from one region to the next; 0: all ranks have the same
    int rank;

    std::byte* region(int of) const { return mapping->data() + static_cast<size_t>(of) * stride; }
    std::byte* data() const { return region(rank); }
};

class Arena {
  public:
    // Where [data, data + bytes) lies: a number equal on ranks where it is the same place (never
    // 0), and the block, kept alive. 0 for ordinary memory.
    uint64_t find(const std::byte* data, size_t bytes, std::shared_ptr<SharedBlock>* block) const;
    void add(const std::shared_ptr<SharedBlock>& block);
    uint32_t next_id() { return ++last_id_; }
    bool empty() const { return count_.load(std::memory_order_relaxed) == 0; }

  private:
    mutable std::mutex lock_;
    mutable std::map<const std::byte*, std::weak_ptr<SharedBlock>> blocks_;  // by region's start
    mutable std::atomic<size_t> count_{0};
    uint32_t last_id_ = 0;
};

}  // namespace dure
