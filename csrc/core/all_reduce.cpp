// all_reduce and reduce.
//
// Note "Four ways to all_reduce". n ranks, S bytes a rank; "line" is a cache line.
//
//   inlined  S <= 32     one meeting; data travel in the line of the tick
//   small    S <= 16 KiB one meeting; every rank publishes S bytes, reads (n-1) S, and reduces
//                        everything itself, in rank order
//   staged   larger      in chunks of C = 512 KiB, two meetings a chunk. A chunk is cut into n
//                        slices, one a rank. Copy in what others reduce; meet; reduce the own slice
//                        from all staging buffers straight into the own tensor and a copy into
//                        staging; meet; copy out the others' slices.
//                        A rank writes S (n-1)/n + S/n + S bytes, reads 2 S (n-1)/n of others.
//   direct   arena       two meetings in all, no staging: reduce the own slice of all regions,
//                        write the result into all regions. A rank reads S, writes S.
//
// Staging buffers alternate. A buffer may be refilled two chunks later: whoever has passed the
// meeting of the chunk between has left the earlier one. Slices are cut at multiples of a line, so
// no line is written by two ranks.
//
// An element is combined in the order of ranks whichever way is taken, and rounded once: the result
// is the same bit for bit, on all ranks, in all ways. `reduce` is the same but that only the root
// keeps the result; others reduce their slice into staging alone.
#include "group.h"

namespace dure {

namespace {

constexpr size_t kSmallBytes = 16 * 1024;

}  // namespace

// An operation that goes through the staging buffers.
struct Group::Staged {
    Block tensor;
    ReduceFn kernel;
    size_t item;
    bool keeps;  // this rank wants the result
};

// How `bytes` are cut into one slice for each rank.
struct Group::Slices {
    size_t bytes, per;
    Slices(size_t bytes, int n)
        : bytes(bytes),
          per(round_up((bytes + static_cast<size_t>(n) - 1) / static_cast<size_t>(n), kLine)) {}
    size_t begin(int rank) const { return std::min(static_cast<size_t>(rank) * per, bytes); }
    size_t length(int rank) const { return begin(rank + 1) - begin(rank); }
};

Status Group::reduce(Block tensor, const Call& call) {
    ReduceFn kernel = reduce_kernel(call.dtype, call.reduction);
    if (!kernel) return Status::usage;
    std::shared_ptr<SharedBlock> shared;
    const bool large = tensor.bytes > kSmallBytes;
    uint64_t arena = 0;
    if (large && call.root < 0) arena = arena_.find(tensor.data, tensor.bytes, &shared);
    announce(call, tensor.bytes, arena);
    if (tensor.bytes == 0 || size_ == 1) return open();
    if (tensor.bytes <= kInlineBytes) return reduce_inlined(tensor, call.root, kernel);
    if (!large) return reduce_small(tensor, call.root, kernel);
    Staged staged{tensor, kernel, item_bytes(call.dtype), call.root < 0 || call.root == rank_};
    if (arena == 0) copy_in(staged, 0);
    if (Status s = open(); s != Status::ok) return s;
    // Only now is it known where the others' tensors lie.
    bool same_place = arena != 0, some_shared = false;
    for (int r = 0; r < size_; r++) {
        same_place = same_place && slot(r).arena == arena;
        some_shared = some_shared || slot(r).arena != 0;
    }
    if (same_place) return reduce_direct(tensor, *shared, kernel);
    if (some_shared) {
        if (arena != 0) copy_in(staged, 0);
        if (Status s = meet(); s != Status::ok) return s;
    }
    return reduce_staged(staged);
}

// What a kernel reads and writes: filled as needed, on the stack.
struct Group::Places {
    const void* from[kMaxRanks];
    void* to[kMaxRanks];
};

Status Group::reduce_inlined(Block tensor, int root, ReduceFn kernel) {
    OpSlot& mine = slot(rank_);
    std::memcpy(mine.inlined, tensor.data, tensor.bytes);
    const size_t count = tensor.bytes / item_bytes(mine.dtype);
    if (Status s = open(); s != Status::ok) return s;
    if (root >= 0 && root != rank_) return Status::ok;
    Places places;
    for (int r = 0; r < size_; r++) places.from[r] = slot(r).inlined;
    places.to[0] = tensor.data;
    kernel({places.to, 1, places.from, size_, count});
    return Status::ok;
}

Status Group::reduce_small(Block tensor, int root, ReduceFn kernel) {
    std::memcpy(stage(rank_), tensor.data, tensor.bytes);
    const size_t count = tensor.bytes / item_bytes(slot(rank_).dtype);
    if (Status s = open(); s != Status::ok) return s;
    if (root < 0 || root == rank_) {
        Places places;
        for (int r = 0; r < size_; r++) places.from[r] = r == rank_ ? tensor.data : stage(r);
        places.to[0] = tensor.data;
        kernel({places.to, 1, places.from, size_, count});
    }
    next_stage();
    return Status::ok;
}

// Copy what others will reduce of the chunk at `at` into the own staging buffer.
void Group::copy_in(const Staged& staged, size_t at) {
    const size_t len = std::min(kStageBytes, staged.tensor.bytes - at);
    const Slices slices(len, size_);
    const size_t lo = slices.begin(rank_), hi = slices.begin(rank_ + 1);
    std::memcpy(stage(rank_), staged.tensor.data + at, lo);
    std::memcpy(stage(rank_) + hi, staged.tensor.data + at + hi, len - hi);
}

// The first chunk has been copied in and met for.
Status Group::reduce_staged(const Staged& staged) {
    for (size_t at = 0; at < staged.tensor.bytes; at += kStageBytes) {
        if (at > 0) {
            copy_in(staged, at);
            if (Status s = meet(); s != Status::ok) return s;
        }
        reduce_own_slice(staged, at);
        if (Status s = meet(); s != Status::ok) return s;
        if (staged.keeps) copy_out(staged, at);
        next_stage();
    }
    return Status::ok;
}

void Group::reduce_own_slice(const Staged& staged, size_t at) {
    const Slices slices(std::min(kStageBytes, staged.tensor.bytes - at), size_);
    const size_t lo = slices.begin(rank_), length = slices.length(rank_);
    if (length == 0) return;
    std::byte* user = staged.tensor.data + at + lo;
    Places places;
    for (int r = 0; r < size_; r++) places.from[r] = r == rank_ ? user : stage(r) + lo;
    places.to[0] = stage(rank_) + lo;
    places.to[1] = user;
    staged.kernel({places.to, staged.keeps ? 2 : 1, places.from, size_, length / staged.item});
}

void Group::copy_out(const Staged& staged, size_t at) {
    const Slices slices(std::min(kStageBytes, staged.tensor.bytes - at), size_);
    for (int r = 0; r < size_; r++) {
        const size_t lo = slices.begin(r);
        if (r != rank_) {
            std::memcpy(staged.tensor.data + at + lo, stage(r) + lo, slices.length(r));
        }
    }
}

// All tensors lie at one place of the arena, and all ranks have arrived.
Status Group::reduce_direct(Block tensor, const SharedBlock& shared, ReduceFn kernel) {
    const auto offset = static_cast<size_t>(tensor.data - shared.data());
    const Slices slices(tensor.bytes, size_);
    const size_t lo = slices.begin(rank_), length = slices.length(rank_);
    if (length > 0) {
        Places places;
        for (int r = 0; r < size_; r++) {
            places.to[r] = shared.region(r) + offset + lo;
            places.from[r] = places.to[r];
        }
        kernel({places.to, size_, places.from, size_, length / item_bytes(slot(rank_).dtype)});
    }
    return meet();
}

}  // namespace dure
