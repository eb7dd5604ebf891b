// all_reduce and reduce.
//
// Note "Five ways to all_reduce". n ranks, S bytes a rank; "line" is a cache line, C a chunk.
//
//   inlined  S <= 32      one meeting; data travel in the line of the tick
//   whole    S <= 16 KiB  one meeting: every rank publishes S bytes, reads (n-1) S, and reduces
//                         everything itself
//   swapped  n = 2        see below: ceil(S / C) + 1 meetings; writes S, of others too
//   sliced   larger       ceil(S / C) + 1 meetings. A chunk is cut into n slices, one a rank. Copy
//                         in what others reduce; meet; reduce the own slice from all staging
//                         buffers into the own tensor, and a copy into staging; meet; copy out the
//                         others' slices. A rank writes S (n-1)/n + S/n, reads 2 S (n-1)/n of
//                         others.
//   direct   arena        two meetings in all, no staging: reduce the own slice of all regions,
//                         write the result into all regions. A rank reads S, writes S.
//
// Note "Chunks overlap". One meeting serves two chunks: what must come after it in one lies beside
// what must come before it in the other. `sliced`: reduce the slice of chunk k, copy in chunk k+1,
// arrive, copy out chunk k-1, wait. Buffers are used in turn, and whoever begins to fill the buffer
// of chunk k+1 knows that all have arrived in chunk k-1, thus have left chunk k-3: so four buffers
// suffice. Slices are cut at multiples of a line, so no line is written by two ranks at a time.
//
// Note "Swapped". What costs is moving lines between cores, most of all writing one that another
// core has read: its copy must be called back first. Between two ranks that can be avoided. Each
// puts the peer's half of a chunk into its own buffer; the peer adds its half and leaves the result
// where it found the summand, a line that is then in its own cache and nowhere else; the owner
// takes the result and leaves the next summand but one. So a line is always read and written at
// once, and moves once for each half of the way. Only the owner touches a buffer after the last
// meeting.
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
    if (tensor.bytes > kWholeBytes && call.root < 0) {
        place = arena_.find(tensor.data, tensor.bytes, &shared);
    }
    announce(call, tensor.bytes, place);
    if (tensor.bytes == 0 || size_ == 1) return open();
    if (tensor.bytes <= kInlineBytes) return reduce_inlined(tensor, call.root, kernel);
    if (tensor.bytes <= kWholeBytes) return reduce_whole(tensor, call.root, kernel);
    // Two ranks stage half of a chunk.
    const Staged staged{tensor, kernel, item_bytes(call.dtype), size_ == 2 ? 2 * chunk_ : chunk_,
                        call.root < 0 || call.root == rank_};
    auto begin = [&] { size_ == 2 ? offer(staged, 0) : copy_in(staged, 0); };
    if (place == 0) begin();
    if (Status s = open(); s != Status::ok) return s;
    // Only now is it known where the others' tensors lie.
    const Sharing sharing = sharing_of(place);
    if (sharing == Sharing::all) return reduce_direct(tensor, *shared, kernel);
    if (sharing == Sharing::some) {
        if (place != 0) begin();
        if (Status s = meet(); s != Status::ok) return s;
    }
    return size_ == 2 ? reduce_swapped(staged) : reduce_sliced(staged);
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

Status Group::reduce_whole(Block tensor, int root, ReduceFn kernel) {
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

// ---- swapped ------------------------------------------------------------------------------------

// Put the half of chunk `k` that the peer reduces into the own buffer.
void Group::offer(const Staged& staged, size_t k) {
    const Block piece = staged.piece(k);
    const Slices slices(piece.bytes, size_);
    const int peer = 1 - rank_;
    std::memcpy(stage(rank_, k % 2), piece.data + slices.begin(peer), slices.length(peer));
}

// Chunk 0 has been offered and met for.
Status Group::reduce_swapped(const Staged& staged) {
    const size_t chunks = staged.chunks();
    if (chunks > 1) offer(staged, 1);
    for (size_t k = 0; k < chunks; k++) {
        answer(staged, k);
        if (Status s = meet(); s != Status::ok) return s;
        swap(staged, k);
    }
    return Status::ok;
}

// Reduce the own half of chunk `k` into the tensor, and where the peer's summand lay.
void Group::answer(const Staged& staged, size_t k) {
    const Block piece = staged.piece(k);
    const Slices slices(piece.bytes, size_);
    std::byte* mine = piece.data + slices.begin(rank_);
    std::byte* theirs = stage(1 - rank_, k % 2);
    const void* from[2] = {rank_ == 0 ? mine : theirs, rank_ == 0 ? theirs : mine};
    void* to[2] = {theirs, mine};
    const size_t length = slices.length(rank_);
    if (length) staged.kernel({to, staged.keeps ? 2 : 1, from, 2, length / staged.item});
}

// Take the result of chunk `k` out of the own buffer, and offer chunk k+2 there.
void Group::swap(const Staged& staged, size_t k) {
    constexpr size_t kStep = 16 * 1024;  // stays in the first-level cache
    const int peer = 1 - rank_;
    const Block piece = staged.piece(k);
    const Slices slices(piece.bytes, size_);
    Block next;
    if (k + 2 < staged.chunks()) {
        next = staged.piece(k + 2);
        const Slices halves(next.bytes, size_);
        next = {next.data + halves.begin(peer), halves.length(peer)};
    }
    std::byte* buffer = stage(rank_, k % 2);
    std::byte* out = piece.data + slices.begin(peer);
    const size_t length = slices.length(peer);
    for (size_t at = 0; at < length; at += kStep) {
        if (staged.keeps) std::memcpy(out + at, buffer + at, std::min(kStep, length - at));
        if (at < next.bytes) {
            std::memcpy(buffer + at, next.data + at, std::min(kStep, next.bytes - at));
        }
    }
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
    // One long copy into lines that others have read costs a third of many short ones.
    places.to[0] = (staged.keeps ? piece.data : stage(rank_, k)) + lo;
    staged.kernel({places.to, 1, places.from, size_, length / staged.item});
    if (staged.keeps) std::memcpy(stage(rank_, k) + lo, piece.data + lo, length);
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
