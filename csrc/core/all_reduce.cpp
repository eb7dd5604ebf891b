// all_reduce and reduce.
//
// Note "Five ways to all_reduce". n ranks, S bytes a rank; "line" is a cache line, C a chunk.
//
//   inline     S <= 32      one barrier; data travel in the line of the tick
//   one-shot   S <= 16 KiB  one barrier: every rank publishes S bytes, reads (n-1) S, and reduces
//                           everything itself; two ranks swap buffers (move.cpp, "Swapped")
//   pairwise   n = 2        "Pairwise exchange" below: ceil(S / C) + 1 barriers; writes S, of
//                           others too
//   two-shot   larger       ceil(S / C) + 1 barriers. A chunk is cut into n slices, one a rank.
//                           Copy in what others reduce; barrier; reduce the own slice from all
//                           staging buffers into the own tensor, and a copy into staging; barrier;
//                           copy out the others' slices. A rank writes S (n-1)/n + S/n, reads
//                           2 S (n-1)/n of others.
//   zero-copy  heap         two barriers in all, no staging: reduce the own slice of all ranks'
//                           tensors where they lie in the symmetric heaps, and write the result
//                           into all of them. A rank reads S, writes S.
//
// All but zero-copy may leave the own tensor as it is and write the result elsewhere: each element
// is read in one place, and written in the other.
//
// Note "Chunks overlap". One barrier serves two chunks: what must come after it in one lies beside
// what must come before it in the other. `two-shot`: reduce the slice of chunk k, copy in chunk
// k+1, arrive, copy out chunk k-1, wait. Buffers are used in turn, and whoever begins to fill the
// buffer of chunk k+1 knows that all have arrived in chunk k-1, thus have left chunk k-3: so four
// buffers suffice. Slices are cut at multiples of a line, so no line is written by two ranks at a
// time.
//
// Note "Pairwise exchange". What costs is moving lines between cores, most of all writing one that
// another core has read: its copy must be called back first. Between two ranks that can be avoided.
// Each puts the peer's half of a chunk into its own buffer; the peer adds its half and leaves the
// result where it found the summand, a line that is then in its own cache and nowhere else; the
// owner takes the result and leaves the next summand but one. So a line is always read and written
// at once, and moves once for each half of the way. Only the owner touches a buffer after the last
// barrier.
//
// An element is combined in the order of ranks whichever way is taken, and rounded once: the result
// is the same bit for bit, on all ranks, in all ways. `reduce` is the same but that only the root
// keeps the result.
#include "channel.h"
#include "copying.h"

namespace dure {

namespace {

constexpr size_t kOneShotBytes = 16 * 1024;
constexpr size_t kStep = 16 * 1024;  // stays in the first-level cache

// Copies of two ranks: results out of the own buffer, summands into it, results past the cache.
QuickerWay taking, offering, past_cache;

}  // namespace

// An operation that goes through the staging buffers.
struct Channel::Staged {
    Block tensor;            // where the result goes
    const std::byte* given;  // what this rank adds: the same memory, or other
    ReduceFn kernel;
    size_t item, chunk;
    bool keeps;  // this rank wants the result

    size_t chunks() const { return (tensor.bytes + chunk - 1) / chunk; }
    Block piece(size_t k) const {
        return {tensor.data + k * chunk, std::min(chunk, tensor.bytes - k * chunk)};
    }
    const std::byte* given_piece(size_t k) const { return given + k * chunk; }
    // Whether what is given and the results of both of two ranks lie in no cache.
    bool large() const { return exceeds_cache(4 * tensor.bytes); }
    // Whether the result is written past the cache (copying.h): not where the tensor was just read.
    bool streams() const { return given != tensor.data && large(); }
    // How much is copied between two other things: what is streamed costs more to begin.
    size_t step() const { return streams() ? 2 * kStep : kStep; }
};

// How `bytes` are cut into one slice for each rank.
struct Channel::Slices {
    size_t bytes, per;
    Slices(size_t bytes, int n)
        : bytes(bytes),
          per(round_up((bytes + static_cast<size_t>(n) - 1) / static_cast<size_t>(n), kLine)) {}
    size_t begin(int rank) const { return std::min(static_cast<size_t>(rank) * per, bytes); }
    size_t length(int rank) const { return begin(rank + 1) - begin(rank); }
};

Status Channel::reduce(Block tensor, const Call& call) {
    ReduceFn kernel = reduce_kernel(call.dtype, call.reduction);
    if (!kernel) return Status::usage;
    const std::byte* given = call.inputs.empty() ? tensor.data : call.inputs[0].data;
    uint64_t place = 0;
    if (tensor.bytes > kOneShotBytes && call.root < 0 && given == tensor.data) {
        place = group_.find_in_heap(tensor.data, tensor.bytes);
    }
    write_header(call, tensor.bytes, place);
    if (tensor.bytes == 0) return exchange_headers();
    if (size_ == 1 && call.reduction != Reduction::premul_sum) {
        if (given != tensor.data) std::memcpy(tensor.data, given, tensor.bytes);
        return exchange_headers();
    }
    if (tensor.bytes <= kInlineBytes) return reduce_inline(tensor, given, call.root, kernel);
    if (tensor.bytes <= kOneShotBytes) return reduce_one_shot(tensor, given, call.root, kernel);
    // Two ranks stage half of a chunk.
    const Staged staged{tensor,
                        given,
                        kernel,
                        item_bytes(call.dtype),
                        size_ == 2 ? 2 * chunk_ : chunk_,
                        call.root < 0 || call.root == rank_};
    auto begin = [&] { size_ == 2 ? offer(staged, 0) : copy_in(staged, 0); };
    if (place == 0) begin();
    if (Status s = exchange_headers(); s != Status::ok) return s;
    // Only now is it known where the others' tensors lie.
    const InHeap tensors = in_heap();
    if (tensors == InHeap::all) return reduce_zero_copy(staged);
    if (tensors == InHeap::some) {
        if (place != 0) begin();
        if (Status s = barrier(); s != Status::ok) return s;
    }
    return size_ == 2 ? reduce_pairwise(staged) : reduce_two_shot(staged);
}

// What a kernel reads and writes: filled as needed, on the stack.
struct Channel::Places {
    const void* from[kMaxRanks];
    void* to[kMaxRanks];
};

Status Channel::reduce_inline(Block tensor, const std::byte* given, int root, ReduceFn kernel) {
    OpSlot& mine = slot(rank_);
    std::memcpy(mine.inlined, given, tensor.bytes);
    const size_t count = tensor.bytes / item_bytes(mine.dtype);
    if (Status s = exchange_headers(); s != Status::ok) return s;
    if (root >= 0 && root != rank_) return Status::ok;
    Places places;
    for (int r = 0; r < size_; r++) places.from[r] = slot(r).inlined;
    places.to[0] = tensor.data;
    combine(kernel, places.to, 1, places.from, count);
    return Status::ok;
}

Status Channel::reduce_one_shot(Block tensor, const std::byte* given, int root, ReduceFn kernel) {
    const auto published = [&](int r) { return size_ == 2 ? swap_buffer(r, 0) : stage(r); };
    std::memcpy(published(rank_), given, tensor.bytes);
    const size_t count = tensor.bytes / item_bytes(slot(rank_).dtype);
    if (Status s = exchange_headers(); s != Status::ok) return s;
    if (root < 0 || root == rank_) {
        Places places;
        for (int r = 0; r < size_; r++) places.from[r] = r == rank_ ? given : published(r);
        places.to[0] = tensor.data;
        combine(kernel, places.to, 1, places.from, count);
    }
    if (size_ == 2) {
        swapped_++;
    } else {
        next_stage();
    }
    return Status::ok;
}

// ---- pairwise exchange --------------------------------------------------------------------------

// Put the half of chunk `k` that the peer reduces into the own buffer.
void Channel::offer(const Staged& staged, size_t k) {
    const Slices slices(staged.piece(k).bytes, size_);
    const int peer = 1 - rank_;
    std::memcpy(stage(rank_, k % 2), staged.given_piece(k) + slices.begin(peer),
                slices.length(peer));
}

// Chunk 0 has been offered, and a barrier has followed.
Status Channel::reduce_pairwise(const Staged& staged) {
    const size_t chunks = staged.chunks();
    if (chunks > 1) offer(staged, 1);
    for (size_t k = 0; k < chunks; k++) {
        answer(staged, k);
        if (Status s = barrier(); s != Status::ok) return s;
        swap(staged, k);
    }
    return Status::ok;
}

// Reduce the own half of chunk `k` into the tensor, and where the peer's summand lay.
void Channel::answer(const Staged& staged, size_t k) {
    const Block piece = staged.piece(k);
    const Slices slices(piece.bytes, size_);
    const size_t begin = slices.begin(rank_), length = slices.length(rank_);
    const std::byte* mine = staged.given_piece(k) + begin;
    std::byte* theirs = stage(1 - rank_, k % 2);
    const void* from[2] = {rank_ == 0 ? mine : theirs, rank_ == 0 ? theirs : mine};
    void* to[2] = {theirs, piece.data + begin};
    if (length == 0) return;
    if (!staged.streams()) {
        combine(staged.kernel, to, staged.keeps ? 2 : 1, from, length / staged.item);
        return;
    }
    for (size_t at = 0, step = staged.step(); at < length; at += step) {
        const size_t now = std::min(step, length - at);
        const void* some[2] = {static_cast<const std::byte*>(from[0]) + at,
                               static_cast<const std::byte*>(from[1]) + at};
        void* there[1] = {theirs + at};
        combine(staged.kernel, there, 1, some, now / staged.item);
        large_copy(past_cache, piece.data + begin + at, theirs + at, now);
    }
}

// Take the result of chunk `k` out of the own buffer, and offer chunk k+2 there.
void Channel::swap(const Staged& staged, size_t k) {
    const bool streams = staged.streams(), large = staged.large();
    const size_t step = staged.step();
    const int peer = 1 - rank_;
    const Block piece = staged.piece(k);
    const Slices slices(piece.bytes, size_);
    const std::byte* next = nullptr;
    size_t next_length = 0;
    if (k + 2 < staged.chunks()) {
        const Slices halves(staged.piece(k + 2).bytes, size_);
        next = staged.given_piece(k + 2) + halves.begin(peer);
        next_length = halves.length(peer);
    }
    std::byte* buffer = stage(rank_, k % 2);
    std::byte* out = piece.data + slices.begin(peer);
    const size_t length = slices.length(peer);
    for (size_t at = 0; at < length; at += step) {
        if (staged.keeps) {
            const size_t now = std::min(step, length - at);
            if (streams) {
                large_copy(past_cache, out + at, buffer + at, now);
            } else {
                fetch_copy(taking, out + at, buffer + at, now, length - at - now);
            }
        }
        if (at < next_length) {
            const size_t now = std::min(step, next_length - at);
            if (large) {
                fetch_copy(offering, buffer + at, next + at, now, next_length - at - now);
            } else {
                std::memcpy(buffer + at, next + at, now);
            }
        }
    }
}

// ---- two-shot -----------------------------------------------------------------------------------

// Copy what others will reduce of chunk `k` into the own staging buffer.
void Channel::copy_in(const Staged& staged, size_t k) {
    const Block piece = staged.piece(k);
    const Slices slices(piece.bytes, size_);
    const size_t lo = slices.begin(rank_), hi = slices.begin(rank_ + 1);
    const std::byte* given = staged.given_piece(k);
    std::memcpy(stage(rank_, k), given, lo);
    std::memcpy(stage(rank_, k) + hi, given + hi, piece.bytes - hi);
}

// Chunk 0 has been copied in, and a barrier has followed.
Status Channel::reduce_two_shot(const Staged& staged) {
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

void Channel::reduce_own_slice(const Staged& staged, size_t k) {
    const Block piece = staged.piece(k);
    const Slices slices(piece.bytes, size_);
    const size_t lo = slices.begin(rank_), length = slices.length(rank_);
    if (length == 0) return;
    Places places;
    for (int r = 0; r < size_; r++) {
        places.from[r] = (r == rank_ ? staged.given_piece(k) : stage(r, k)) + lo;
    }
    // One long copy into lines that others have read costs a third of many short ones.
    places.to[0] = (staged.keeps ? piece.data : stage(rank_, k)) + lo;
    combine(staged.kernel, places.to, 1, places.from, length / staged.item);
    if (staged.keeps) std::memcpy(stage(rank_, k) + lo, piece.data + lo, length);
}

void Channel::copy_out(const Staged& staged, size_t k) {
    if (!staged.keeps) return;
    const Block piece = staged.piece(k);
    const Slices slices(piece.bytes, size_);
    for (int i = 1; i < size_; i++) {
        const int r = (rank_ + i) % size_;  // not all at the same rank at once
        const size_t lo = slices.begin(r);
        std::memcpy(piece.data + lo, stage(r, k) + lo, slices.length(r));
    }
}

// ---- zero-copy ----------------------------------------------------------------------------------

// Which ranks' tensors lie in symmetric heaps, so that all can use them there. Two ranks that name
// memory of one heap (of a node-shared tensor) must name the same: others might overlap, and one
// would read what the other has written already. Known after `exchange_headers`, and the same on
// all ranks.
Channel::InHeap Channel::in_heap() const {
    bool all = true, some = false, one_memory = true;
    for (int r = 0; r < size_; r++) {
        const uint64_t place = slot(r).heap;
        all = all && place != 0 && slot(r).even;
        some = some || place != 0;
        one_memory = one_memory && place == slot(0).heap;
    }
    if (!all) return some ? InHeap::some : InHeap::none;
    if (one_memory) return InHeap::all;
    uint64_t owners[kMaxRanks / 64] = {};
    for (int r = 0; r < size_; r++) {
        const int owner = HeapPlace::owner(slot(r).heap);
        const uint64_t bit = uint64_t{1} << (owner % 64);
        if (owners[owner / 64] & bit) return InHeap::some;
        owners[owner / 64] |= bit;
    }
    return InHeap::all;
}

// All tensors lie in symmetric heaps, and all ranks have arrived. If a rank is lost now, another
// one that was kept from its core may still write its slice of our tensor after we have returned:
// so its memory is retired (symmetric_heap.h).
Status Channel::reduce_zero_copy(const Staged& staged) {
    const Block tensor = staged.tensor;
    const Slices slices(tensor.bytes, size_);
    const size_t lo = slices.begin(rank_), length = slices.length(rank_);
    if (length > 0) {
        Places places;
        for (int r = 0; r < size_; r++) {
            places.to[r] = group_.at(slot(r).heap) + lo;
            places.from[r] = places.to[r];
        }
        const int num_outs = slot(0).heap == slot(size_ - 1).heap ? 1 : size_;
        combine(staged.kernel, places.to, num_outs, places.from, length / staged.item);
    }
    const Status s = barrier();
    if (s != Status::ok) group_.heap().retire(tensor.data);
    return s;
}

// Combine `count` elements of all ranks; after `exchange_headers`, which brought the factors of a
// premultiplied sum.
void Channel::combine(ReduceFn kernel, void* const* to, int num_to, const void* const* from,
                      size_t count) {
    Operands operands{to, num_to, from, size_, count};
    if (slot(rank_).reduction == Reduction::premul_sum) operands.factors = factors();
    kernel(operands);
}

const double* Channel::factors() {
    for (int r = 0; r < size_; r++) factors_[r] = slot(r).factor;
    return factors_;
}

}  // namespace dure
