// all_reduce and reduce.
//
// Note "Five ways to all_reduce". n ranks, S bytes a rank; "line" is a cache line, C a chunk.
//
//   inlined  S <= 32      one meeting; data travel in the line of the tick
//   whole    S <= 16 KiB, one meeting for each C bytes: every rank publishes them, reads those of
//            or n = 2     the others and reduces everything itself. A rank writes S, reads (n-1) S.
//   sliced   larger       one meeting for each C bytes and one more. A chunk is cut into n slices,
//                         one a rank. Copy in what others reduce; meet; reduce the own slice from
//                         all staging buffers straight into the own tensor and a copy into staging;
//                         meet; copy out the others' slices.
//                         A rank writes S (n-1)/n + S/n, reads 2 S (n-1)/n of others.
//   direct   arena        two meetings in all, no staging: reduce the own slice of all regions,
//                         write the result into all regions. A rank reads S, writes S.
//
// Two ranks work whole at any size: the slices would save half of the additions, which cost nothing
// beside the bytes moved, and cost twice the meetings.
//
// Note "Chunks overlap". Between two meetings a rank works on several chunks, so that one meeting
// serves them all and what a chunk's slowest rank is late is made up in the next. `whole`: copy in
// chunk k+1, arrive, see that all have arrived with chunk k, reduce it. `sliced`: reduce the slice
// of chunk k, copy in chunk k+1, arrive, copy out chunk k-1, wait. Buffers are used in turn, and
// whoever begins to fill the buffer of chunk k+1 knows that all have arrived with chunk k-1, thus
// have left chunk k-3: so four buffers suffice. Slices are cut at multiples of a line, so no line
// is written by two ranks.
//
// An element is combined in the order of ranks whichever way is taken, and rounded once: the result
// is the same bit for bit, on all ranks, in all ways. `reduce` is the same but that only the root
// keeps the result.
#include "group.h"

namespace dure {

namespace {

constexpr size_t kWholeBytes = 16 * 1024;

}  // namespace

// An operation that goes through the staging buffers.
struct Group::Staged {
    Block tensor;
    ReduceFn kernel;
    size_t item, chunk;
    bool keeps;  // this rank wants the result

    size_t chunks() const { return (tensor.bytes + chunk - 1) / chunk; }
    Block piece(size_t k) const {
        return {tensor.data + k * chunk, std::min(chunk, tensor.bytes - k * chunk)};
    }
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
    uint64_t place = 0;
    if (tensor.bytes >= kDirectBytes && call.root < 0) {
        place = arena_.find(tensor.data, tensor.bytes, &shared);
    }
    announce(call, tensor.bytes, place);
    if (tensor.bytes == 0 || size_ == 1) return open();
    if (tensor.bytes <= kInlineBytes) return reduce_inlined(tensor, call.root, kernel);
    const Staged staged{tensor, kernel, item_bytes(call.dtype), chunk_,
                        call.root < 0 || call.root == rank_};
    const bool whole = size_ == 2 || tensor.bytes <= kWholeBytes;
    auto begin = [&] { whole ? copy_whole(staged, 0) : copy_in(staged, 0); };
    if (place == 0) begin();
    if (Status s = open(); s != Status::ok) return s;
    // Only now is it known where the others' tensors lie.
    const Sharing sharing = sharing_of(place);
    if (sharing == Sharing::all) return reduce_direct(tensor, *shared, kernel);
    if (sharing == Sharing::some) {
        if (place != 0) begin();
        if (Status s = meet(); s != Status::ok) return s;
    }
    return whole ? reduce_whole(staged) : reduce_sliced(staged);
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

// ---- whole --------------------------------------------------------------------------------------

void Group::copy_whole(const Staged& staged, size_t k) {
    const Block piece = staged.piece(k);
    std::memcpy(stage(rank_, k), piece.data, piece.bytes);
}

// Chunk 0 has been copied in and met for.
Status Group::reduce_whole(const Staged& staged) {
    const size_t chunks = staged.chunks();
    for (size_t k = 0; k < chunks; k++) {
        const bool more = k + 1 < chunks;
        if (more) {
            copy_whole(staged, k + 1);
            arrive();
        }
        if (k > 0) {
            if (Status s = await_all_but(more ? 1 : 0); s != Status::ok) return s;
        }
        if (!staged.keeps) continue;
        const Block piece = staged.piece(k);
        Places places;
        for (int r = 0; r < size_; r++) places.from[r] = r == rank_ ? piece.data : stage(r, k);
        places.to[0] = piece.data;
        staged.kernel({places.to, 1, places.from, size_, piece.bytes / staged.item});
    }
    next_stage(chunks);
    return Status::ok;
}

// ---- sliced -------------------------------------------------------------------------------------

// Copy what others will reduce of chunk `k` into the own staging buffer.
void Group::copy_in(const Staged& staged, size_t k) {
    const Block piece = staged.piece(k);
    const Slices slices(piece.bytes, size_);
    const size_t lo = slices.begin(rank_), hi = slices.begin(rank_ + 1);
    std::memcpy(stage(rank_, k), piece.data, lo);
    std::memcpy(stage(rank_, k) + hi, piece.data + hi, piece.bytes - hi);
}

// Chunk 0 has been copied in and met for.
Status Group::reduce_sliced(const Staged& staged) {
    const size_t chunks = staged.chunks();
    for (size_t k = 0; k < chunks; k++) {
        reduce_own_slice(staged, k);
        if (k + 1 < chunks) copy_in(staged, k + 1);
        arrive();
        if (k > 0) copy_out(staged, k - 1);
        if (Status s = await_all(); s != Status::ok) return s;
    }
    copy_out(staged, chunks - 1);
    next_stage(chunks);
    return Status::ok;
}

void Group::reduce_own_slice(const Staged& staged, size_t k) {
    const Block piece = staged.piece(k);
    const Slices slices(piece.bytes, size_);
    const size_t lo = slices.begin(rank_), length = slices.length(rank_);
    if (length == 0) return;
    Places places;
    for (int r = 0; r < size_; r++) {
        places.from[r] = (r == rank_ ? piece.data : stage(r, k)) + lo;
    }
    places.to[0] = stage(rank_, k) + lo;
    places.to[1] = piece.data + lo;
    staged.kernel({places.to, staged.keeps ? 2 : 1, places.from, size_, length / staged.item});
}

void Group::copy_out(const Staged& staged, size_t k) {
    if (!staged.keeps) return;
    const Block piece = staged.piece(k);
    const Slices slices(piece.bytes, size_);
    for (int i = 1; i < size_; i++) {
        const int r = (rank_ + i) % size_;  // not all at the same rank at once
        const size_t lo = slices.begin(r);
        std::memcpy(piece.data + lo, stage(r, k) + lo, slices.length(r));
    }
}

// ---- direct -------------------------------------------------------------------------------------

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
