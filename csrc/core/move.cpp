// Moving blocks: broadcast, all_gather, gather, scatter, all_to_all; and reduce_scatter, which is
// an all_to_all whose receiver adds up what it gets.
//
// Note "Rounds". Rank i has a block for rank j. In every round each rank copies the next piece of
// its blocks into its staging buffer, then comes a barrier, and each copies (or reduces) the pieces
// meant for it out of the others' buffers. A buffer is cut into `parts` equal pieces:
//
//   broadcast, all_gather        1 part that all read (the same block for everybody)
//   gather                       1 part, for the root
//   scatter, all_to_all,         n-1 parts, one for each peer
//   reduce_scatter
//
// One barrier a round: a rank copies in the pieces of round k+1, arrives, sees that all have
// arrived with those of round k, and takes them. The slowest rank of a round can catch up in the
// next. Four buffers used in turn suffice, as in all_reduce.cpp, note "Chunks overlap".
//
// Note "Swapped". Two ranks that both send swap buffers: each puts its next piece but one into the
// buffer out of which it has just taken the peer's, whose lines are in its own cache then; those of
// a buffer that the peer has read would have to be called back. A buffer belongs to who has taken
// from it, until he has put and arrived. So nobody waits before he puts, from one operation to the
// next neither.
//
// Cost for blocks of B bytes and a buffer of C: ceil(B parts / C) barriers; a rank writes B parts
// into staging and reads what is meant for it, once. A lone block of at most 32 bytes travels in
// the line of the tick instead.
//
// Zero-copy: where all that is sent lies in symmetric heaps, each takes it from there, whole; one
// barrier before, one after, no staging.
//
// Copied once: where that is the quicker way (block_ways.h), blocks are read straight out of the
// others' memory (single_copy.h), whose addresses stand where small data would: one barrier before,
// one after, no staging.
// Each rank copies what it receives; no rank writes into another's ordinary memory, which may have
// another use when its call has failed. Where a copy fails, all ranks begin again through staging.
// Only in a broadcast of two ranks whose tensors both lie in heaps does the root write the second
// half: if the call fails, that memory is retired (symmetric_heap.h).
//
// Runs: blocks that an all_to_all moves, and those that a scatter sends, may lie in runs (a tensor
// that is cut along another dimension than its first). Staged, a piece is put and taken run by run,
// so nothing is packed before. From a heap blocks are taken only where they lie in one piece, and
// copied once only if results do too.
//
// In place: a piece is read before anything is written at its place, as long as a rank's block from
// itself lies where its block to itself lies. A rank whose results lie where others read
// (all_to_all in place) tells no address, and does not ask for the zero-copy way.
#include "channel.h"
#include "copying.h"
#include "single_copy.h"

namespace dure {

namespace {

// A place in a block that may lie in runs: bytes are counted run after run.
class Reach {
  public:
    Reach(Block block, const Runs& runs, size_t begin)
        : run_(runs.apart() ? block.bytes / runs.count : SIZE_MAX), gap_(runs.step - run_) {
        if (!runs.apart()) {
            at_ = block.data + begin;
            left_ = SIZE_MAX;
        } else {
            at_ = block.data + begin / run_ * runs.step + begin % run_;
            left_ = run_ - begin % run_;
        }
    }
    std::byte* at() const { return at_; }
    size_t left() const { return left_; }  // bytes to the end of the run
    void go_on(size_t bytes) {
        at_ += bytes;
        left_ -= bytes;
        if (left_ == 0) {
            at_ += gap_;
            left_ = run_;
        }
    }

  private:
    size_t run_, gap_;
    std::byte* at_;
    size_t left_;
};

// Copy `bytes` by `copy(to, from, bytes)`, as many at a time as lie side by side on both sides.
template <typename F>
void copy_runs(Reach to, Reach from, size_t bytes, F copy) {
    while (bytes > 0) {
        const size_t now = std::min({bytes, to.left(), from.left()});
        copy(to.at(), from.at(), now);
        bytes -= now;
        to.go_on(now);
        from.go_on(now);
    }
}

// Copies into staging, and past the cache.
QuickerWay putting, past_cache;

}  // namespace

// One collective as seen by this rank: which block goes to, and comes from, each rank.
struct Channel::Transfer {
    const Call& call;
    const int rank, size;
    const bool shared;  // one block for everybody
    const size_t parts;
    const size_t piece;         // bytes of a part
    ReduceFn kernel = nullptr;  // of reduce_scatter
    const double* factors = nullptr;
    const bool swaps;      // two ranks, each with something for the other
    bool streams = false;  // see copying.h

    Transfer(const Call& c, int rank, int size, size_t chunk)
        : call(c),
          rank(rank),
          size(size),
          shared(c.op == Op::broadcast || c.op == Op::all_gather),
          parts(shared || c.op == Op::gather || size < 3 ? 1 : static_cast<size_t>(size) - 1),
          piece(chunk / parts / kLine * kLine),
          swaps(size == 2 &&
                (c.op == Op::all_gather || c.op == Op::all_to_all || c.op == Op::reduce_scatter)) {
        size_t touched = 0;
        for (const Block& sent : c.inputs) touched += sent.bytes;
        for (const Block& result : c.outputs) touched += result.bytes;
        streams = c.op != Op::reduce_scatter && exceeds_cache(touched * Transfer::at(size));
    }

    bool may_once(const CopyPlan& plan) const { return plan.permitted && !kernel && size > 1; }
    bool learns(const CopyPlan& plan) const { return may_once(plan) && plan.learns; }
    // Whether a collective's way is learnt whose longest block has `longest` bytes.
    bool learnt(const CopyPlan& plan, size_t longest) const {
        const size_t others = Transfer::at(size) - 1;
        const bool from_all = call.op == Op::all_gather || call.op == Op::all_to_all;
        const size_t sent = longest * others * (from_all ? others + 1 : 1);
        return longest > kLeastLearntBlock && sent <= plan.cache_bytes;
    }

    Block to(int peer) const {
        switch (call.op) {
            case Op::broadcast:
                return rank == call.root ? call.outputs[0] : Block{};
            case Op::all_gather:
                return call.inputs[0];
            case Op::gather:
                return peer == call.root ? call.inputs[0] : Block{};
            case Op::scatter:
                return rank == call.root ? call.inputs[at(peer)] : Block{};
            default:
                return call.inputs[at(peer)];
        }
    }
    Block from(int peer) const {
        switch (call.op) {
            case Op::broadcast:
            case Op::scatter:
                return peer == call.root ? call.outputs[0] : Block{};
            case Op::gather:
                return rank == call.root ? call.outputs[at(peer)] : Block{};
            case Op::reduce_scatter:
                return peer == rank ? call.outputs[0] : Block{};
            default:
                return call.outputs[at(peer)];
        }
    }
    // Where in `sender`'s buffer the piece for `receiver` begins.
    size_t offset(int sender, int receiver) const {
        if (parts == 1) return 0;
        return static_cast<size_t>(receiver < sender ? receiver : receiver - 1) * piece;
    }
    // Of a block in one run: the round's piece; and for any block, how long that is.
    Block cut(Block block, size_t round) const {
        const size_t length = cut_length(block, round);
        return length ? Block{block.data + round * piece, length} : Block{};
    }
    size_t cut_length(Block block, size_t round) const {
        const size_t begin = round * piece;
        return begin < block.bytes ? std::min(piece, block.bytes - begin) : 0;
    }
    // As `cut`, of a reduce_scatter's result, which may be of another dtype.
    Block cut_result(size_t round) const {
        if (!call.converts()) return cut(call.outputs[0], round);
        const size_t given = item_bytes(call.dtype), taken = item_bytes(call.into);
        Block as_given = cut({nullptr, call.outputs[0].bytes / taken * given}, round);
        if (as_given.bytes == 0) return {};
        return {call.outputs[0].data + round * piece / given * taken,
                as_given.bytes / given * taken};
    }
    // Whether a rank sends anything to others.
    bool sends(int rank) const {
        if (call.op == Op::broadcast || call.op == Op::scatter) return rank == call.root;
        return call.op != Op::gather || rank != call.root;
    }
    // What this rank sends, in the order of receivers.
    const std::vector<Block>& sent() const {
        return call.op == Op::broadcast ? call.outputs : call.inputs;
    }
    void copy(std::byte* to, const std::byte* from, size_t bytes) const {
        if (bytes == 0 || to == from) return;
        if (streams) {
            large_copy(past_cache, to, from, bytes);
        } else {
            std::memcpy(to, from, bytes);
        }
    }
    void copy(Reach to, Reach from, size_t bytes) const {
        if (to.at() == from.at()) return;
        const auto plain = [&] { copy_runs(to, from, bytes, std::memcpy); };
        if (!streams) return plain();
        past_cache.copy(bytes, plain, [&] {
            StreamedRanges ranges;
            copy_runs(to, from, bytes, [&](auto... range) { ranges.add(range...); });
            ranges.finish();
        });
    }
    // Write `bytes` from `begin` of a result on, out of one run.
    void copy_to(Block result, size_t begin, const std::byte* from, size_t bytes) const {
        if (bytes == 0) return;
        copy(Reach(result, call.taken, begin), Reach({const_cast<std::byte*>(from), bytes}, {}, 0),
             bytes);
    }
    // The same out of this rank's block to itself.
    void copy_own(size_t begin, size_t bytes) const {
        if (bytes == 0) return;
        copy(Reach(from(rank), call.taken, begin), Reach(to(rank), call.given, begin), bytes);
    }
    // Put what a buffer has room for into it, from `begin` of a block that is sent. What is short
    // is mostly in this core's cache, where a plain copy is the quicker one.
    void put(std::byte* buffer, Block sent, size_t begin, size_t bytes) const {
        constexpr size_t kLong = 64 * 1024;
        if (bytes == 0) return;
        copy_runs({{buffer, bytes}, {}, 0}, {sent, call.given, begin}, bytes,
                  [](std::byte* to, const std::byte* from, size_t now) {
                      if (now < kLong) {
                          std::memcpy(to, from, now);
                      } else {
                          fetch_copy(putting, to, from, now);
                      }
                  });
    }
    void add_up(Block out, const void* const* from) const;
    static size_t at(int rank) { return static_cast<size_t>(rank); }
};

namespace {

bool overlap(Block a, Block b) { return a.data < b.data + b.bytes && b.data < a.data + a.bytes; }

}  // namespace

void Channel::Transfer::add_up(Block out, const void* const* from) const {
    void* to[1] = {out.data};
    kernel({to, 1, from, size, out.bytes / item_bytes(call.result()), factors});
}

// ---- through staging ----------------------------------------------------------------------------

// A lone block that fits travels in the sender's slot; sender and receiver see it there.
bool Channel::inlined(const Transfer& t, int sender) const {
    const OpSlot& s = slot(sender);
    return t.parts == 1 && s.even && s.bytes <= kInlineBytes;
}

// Where `sender` puts the round's pieces.
std::byte* Channel::place(const Transfer& t, int sender, size_t round) const {
    if (inlined(t, sender)) return slot(sender).inlined;
    return t.swaps ? swap_buffer(sender, round) : stage(sender, round);
}

// Put this round's pieces into this rank's buffer.
void Channel::put(const Transfer& t, size_t round) {
    std::byte* buffer = place(t, rank_, round);
    for (int peer = 0; peer < size_; peer++) {
        if (peer == rank_) continue;
        const Block sent = t.to(peer);
        t.put(buffer + t.offset(rank_, peer), sent, round * t.piece, t.cut_length(sent, round));
        if (t.shared) break;
    }
}

// Where the round's piece from `peer` to this rank lies.
const std::byte* Channel::source(const Transfer& t, int peer, size_t round) const {
    return place(t, peer, round) + t.offset(peer, rank_);
}

void Channel::take(const Transfer& t, size_t round) {
    if (t.kernel) {
        const std::byte* own = t.to(rank_).data + round * t.piece;
        const Block out = t.cut_result(round);
        const void* from[kMaxRanks];
        for (int r = 0; r < size_; r++) from[r] = r == rank_ ? own : source(t, r, round);
        if (out.bytes) t.add_up(out, from);
        return;
    }
    // The own block first, which was read a moment ago; then not all from the same rank at once.
    for (int i = 0; i < size_; i++) {
        const int peer = (rank_ + i) % size_;
        const Block result = t.from(peer);
        const size_t begin = round * t.piece, length = t.cut_length(result, round);
        if (peer == rank_)
            t.copy_own(begin, length);
        else
            t.copy_to(result, begin, source(t, peer, round), length);
    }
}

// The first round's pieces have been put and met for.
Status Channel::move_staged(const Transfer& t) {
    const size_t rounds = std::max(most_bytes() + t.piece - 1, t.piece) / t.piece;
    if (t.swaps) return move_swapped(t, rounds);
    for (size_t k = 0; k < rounds; k++) {
        const bool more = k + 1 < rounds;
        if (more) {
            put(t, k + 1);
            arrive();
        }
        if (k > 0) {
            if (Status s = await_all_but(more ? 1 : 0); s != Status::ok) return s;
        }
        take(t, k);
    }
    next_stage(rounds);
    return Status::ok;
}

// As above; what follows a piece but one goes where that piece was taken.
Status Channel::move_swapped(const Transfer& t, size_t rounds) {
    for (size_t k = 0; k < rounds; k++) {
        if (k == 0 && rounds > 1) {
            put(t, 1);
            arrive();
        }
        if (k > 0) {
            const uint32_t lag = k + 1 < rounds ? 1 : 0;
            if (Status s = await_all_but(lag); s != Status::ok) return s;
        }
        take(t, k);
        if (k + 2 < rounds) {
            put(t, k + 2);
            arrive();
        }
    }
    swapped_ += rounds;
    return Status::ok;
}

// ---- copied once --------------------------------------------------------------------------------

// What a rank tells where small data would stand.
struct Channel::Address {
    uint64_t data;    // of its one block; n addresses stand in its next stage; 0: not to be read
    uint64_t failed;  // it could not copy what it should
};

// Say where what this rank sends lies, unless its results would overwrite it.
void Channel::tell_address(const Transfer& t) {
    Address mine{0, 0};
    const std::vector<Block>& sent = t.sent();
    if (sent.size() == 1) {
        mine.data = reinterpret_cast<uint64_t>(sent[0].data);
    } else if (!sent.empty()) {
        auto* list = reinterpret_cast<uint64_t*>(stage(rank_, 1));
        for (size_t i = 0; i < sent.size(); i++) {
            list[i] = reinterpret_cast<uint64_t>(sent[i].data);
        }
        mine.data = 1;
    }
    for (int peer = 0; peer < size_ && t.call.op != Op::broadcast; peer++) {
        const Block result = t.from(peer);
        for (const Block& block : sent) {
            const bool stays = peer == rank_ && result.data == t.to(rank_).data;
            if (!stays && result.bytes && overlap(result, block)) mine.data = 0;
        }
    }
    if (sent.empty() || (sent.size() == 1 && sent[0].bytes == 0)) mine.data = 1;  // nothing to read
    if (t.call.given.apart() || t.call.taken.apart()) mine.data = 0;
    std::memcpy(slot(rank_).inlined, &mine, sizeof mine);
}

uint64_t Channel::address_of(int rank) const {
    uint64_t data = 0;
    std::memcpy(&data, slot(rank).inlined + offsetof(Address, data), sizeof data);
    return data;
}

// Known after the second barrier.
bool Channel::failed_to_copy(int rank) const {
    uint64_t failed = 0;
    std::memcpy(&failed, slot(rank).inlined + offsetof(Address, failed), sizeof failed);
    return failed != 0;
}

// Copy the block from `peer` to this rank out of its memory.
bool Channel::fetch(const Transfer& t, int peer, Block result) const {
    const bool listed = t.call.op == Op::scatter || t.call.op == Op::all_to_all;
    if (const uint64_t place = slot(peer).heap) {
        const size_t before = listed ? Transfer::at(rank_) * result.bytes : 0;
        t.copy_to(result, 0, group_.at(place) + before, result.bytes);
        return true;
    }
    const uint64_t address =
        listed ? reinterpret_cast<const uint64_t*>(stage(peer, 1))[rank_] : address_of(peer);
    return read_from({group_.pid_of(peer), address}, result.data, result.bytes);
}

// Whether a rank whose longest block has `longest` bytes expects that blocks are copied once.
bool Channel::copies_once(const Transfer& t, size_t longest) const {
    const CopyPlan& plan = group_.copies();
    if (!t.may_once(plan)) return false;
    if (!plan.learns) return longest > kInlineBytes && longest >= plan.once_bytes;
    return t.learnt(plan, longest) && block_ways_.once(block_kind(t.call.op, longest));
}

// Whether all ranks that send anything can be read from: out of their heaps, or at an address that
// they have written. A rank whose blocks have one length has written none if it expected staging.
bool Channel::all_readable(const Transfer& t) const {
    for (int r = 0; r < size_; r++) {
        if (!t.sends(r) || slot(r).heap != 0) continue;
        const bool told = !slot(r).even || copies_once(t, slot(r).bytes);
        if (!told || address_of(r) == 0) return false;
    }
    return true;
}

// Whether `rank` has written when it began a collective whose way is learnt.
bool Channel::tells_beginning(int rank) const {
    return !slot(rank).even || slot(rank).bytes > kLeastLearntBlock;
}

// Count a collective whose longest block all know, and whose way is decided. Returns where this
// rank is to write how long it lasted; null for nowhere.
std::atomic<float>* Channel::count_way(const Transfer& t, InHeap tensors, size_t most) {
    const CopyPlan& plan = group_.copies();
    const bool counts = t.learns(plan) && t.learnt(plan, most) && tensors == InHeap::none;
    if (!counts) return nullptr;
    return block_ways_.count(block_kind(t.call.op, most), rank_, size_,
                             [this](int r) { return block(r).block_times; });
}

// A timed try is over.
void Channel::note_time(std::atomic<float>* lasted) const {
    if (!lasted) return;
    int64_t all_begun_ns = 0;
    for (int r = 0; r < size_; r++) {
        if (tells_beginning(r)) all_begun_ns = std::max(all_begun_ns, slot(r).began_ns);
    }
    const bool told = tells_beginning(rank_);
    const int64_t putting_ns = told ? put_ns_ - slot(rank_).began_ns : 0;
    const int64_t from_ns = told ? std::max(all_begun_ns, put_ns_) : all_begun_ns;
    lasted->store(static_cast<float>(putting_ns + now_ns() - from_ns), std::memory_order_relaxed);
}

// Of the ranks that send anything. A rank may send from another's heap (node-shared memory): then
// only if all send the same.
Channel::InHeap Channel::senders_in_heap(const Transfer& t) const {
    bool all = true, some = false, same = true, apart = true;
    uint64_t first = 0, owners[kMaxRanks / 64] = {};
    for (int r = 0; r < size_; r++) {
        if (!t.sends(r)) continue;
        const uint64_t place = slot(r).heap;
        all = all && place != 0;
        some = some || place != 0;
        if (place == 0) continue;
        first = first ? first : place;
        same = same && place == first;
        const int owner = HeapPlace::owner(place);
        const uint64_t bit = uint64_t{1} << (owner % 64);
        apart = apart && (owners[owner / 64] & bit) == 0;
        owners[owner / 64] |= bit;
    }
    if (all && (same || apart)) return InHeap::all;
    return some ? InHeap::some : InHeap::none;
}

// Write what a broadcast sends, from `at` on, into the heap of `peer`.
void Channel::deliver(const Transfer& t, int peer, size_t at) const {
    const Block sent = t.call.outputs[0];
    if (at >= sent.bytes) return;
    t.copy(group_.at(slot(peer).heap) + at, sent.data + at, sent.bytes - at);
}

// All ranks have written where their blocks are. With `shares` both of two ranks move a broadcast.
Status Channel::move_once(const Transfer& t, bool shares) {
    const size_t half = shares ? round_up(t.call.outputs[0].bytes / 2, kPage) : 0;
    bool done = true;
    for (int i = 0; i < size_; i++) {
        const int peer = (rank_ + i) % size_;
        Block result = t.from(peer);
        if (peer == rank_) {
            t.copy_own(0, result.bytes);
        } else if (result.bytes) {
            if (shares) result.bytes = std::min(half, result.bytes);
            done = fetch(t, peer, result) && done;
        } else if (shares && rank_ == t.call.root) {
            deliver(t, peer, half);
        }
    }
    for (int r = 0; r < size_; r++) {
        // Until this rank has arrived no peer is through, so a process that has ended now was
        // ended, and what was read of it may be another's. Later it may have ended well.
        const bool read = r != rank_ && t.from(r).bytes && slot(r).heap == 0;
        if (read && group_.lost(r)) return report_lost(r);
    }
    const uint64_t failed = !done;
    std::memcpy(slot(rank_).inlined + offsetof(Address, failed), &failed, sizeof failed);
    if (Status s = barrier(); s != Status::ok) {
        if (shares) group_.heap().retire(t.call.outputs[0].data);
        return s;
    }
    for (int r = 0; r < size_; r++) done = done && !failed_to_copy(r);
    next_stage();
    if (done) return Status::ok;
    if (Status again = barrier(); again != Status::ok) return again;  // all have seen who failed
    put(t, 0);
    if (Status again = barrier(); again != Status::ok) return again;
    return move_staged(t);
}

Status Channel::report_lost(int rank) {
    Outcome out;
    out.op = op_;
    out.seq = seq_;
    out.status = Status::peer_lost;
    out.peer = rank;
    out.detail = group_.exit_of(rank);
    return group_.abort(std::move(out));
}

// ---- zero-copy ----------------------------------------------------------------------------------

// Where in the symmetric heap what this rank sends lies, if the others could take it from there;
// else 0.
uint64_t Channel::place_of(const Transfer& t) const {
    if (t.call.op == Op::scatter || t.call.given.apart()) return 0;
    const std::vector<Block>& sent = t.sent();
    const Block all{sent[0].data, sent[0].bytes * sent.size()};
    if (all.bytes < kZeroCopyBytes) return 0;
    for (size_t i = 0; i < sent.size(); i++) {
        if (sent[i].bytes != sent[0].bytes || sent[i].data != all.data + i * sent[0].bytes)
            return 0;
    }
    for (int peer = 0; peer < size_ && t.call.op != Op::broadcast; peer++) {
        const Block result = t.from(peer);
        const bool stays = peer == rank_ && result.data == t.to(rank_).data;
        if (!stays && result.bytes && overlap(result, all)) return 0;
    }
    return group_.find_in_heap(all.data, all.bytes);
}

// What all ranks of a reduce_scatter send lies in symmetric heaps, and all ranks have arrived.
Status Channel::reduce_scatter_zero_copy(const Transfer& t) {
    const std::vector<Block>& sent = t.sent();
    const size_t mine = sent.size() == 1 ? 0 : Transfer::at(rank_) * sent[0].bytes;
    const void* from[kMaxRanks];
    for (int r = 0; r < size_; r++) from[r] = group_.at(slot(r).heap) + mine;
    t.add_up(t.call.outputs[0], from);
    return barrier();
}

Status Channel::move(const Call& call) {
    Transfer t(call, rank_, size_, chunk_);
    if (call.op == Op::reduce_scatter) {
        t.kernel = reduce_kernel(call.dtype, call.result(), call.reduction);
        if (!t.kernel) return Status::usage;
    }
    const uint64_t place = place_of(t);
    if (call.op == Op::broadcast)
        write_header(call, call.outputs[0].bytes, place);
    else
        write_block_header(call, place);
    const bool tells = t.learns(group_.copies()) && tells_beginning(rank_);
    if (tells) slot(rank_).began_ns = now_ns();
    const bool once = copies_once(t, longest_block(rank_));
    const bool puts = place == 0 && !once;  // expects to need the stage
    if (once || (t.may_once(group_.copies()) && !slot(rank_).even)) tell_address(t);
    if (puts) put(t, 0);
    if (tells) put_ns_ = now_ns();
    if (Status s = exchange_headers(); s != Status::ok) return s;
    if (call.reduction == Reduction::premul_sum) t.factors = factors();
    const InHeap tensors = t.kernel ? in_heap() : senders_in_heap(t);
    if (tensors == InHeap::all && t.kernel) return reduce_scatter_zero_copy(t);
    const size_t most = most_bytes();
    if (tensors == InHeap::all || (copies_once(t, most) && all_readable(t))) {
        std::atomic<float>* const lasted = count_way(t, tensors, most);
        const bool both_in_heap = slot(0).heap != 0 && slot(size_ - 1).heap != 0;
        const Status s = move_once(t, call.op == Op::broadcast && size_ == 2 && both_in_heap);
        note_time(lasted);
        return s;
    }
    // Some rank may not have put its first pieces yet.
    bool some_once = false;
    for (int r = 0; r < size_; r++) some_once = some_once || copies_once(t, longest_block(r));
    std::atomic<float>* const lasted = count_way(t, tensors, most);
    if (tensors == InHeap::some || some_once) {
        if (!puts) put(t, 0);
        if (Status s = barrier(); s != Status::ok) return s;
    }
    const Status s = move_staged(t);
    note_time(lasted);
    return s;
}

}  // namespace dure
