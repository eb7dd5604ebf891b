// Moving blocks: broadcast, all_gather, gather, scatter, all_to_all; and reduce_scatter, which is
// an all_to_all whose receiver adds up what it gets.
//
// Note "Rounds". Rank i has a block for rank j. In every round each rank copies the next piece of
// its blocks into its staging buffer, all meet, and each copies (or reduces) the pieces meant for
// it out of the others' buffers. A buffer is cut into `parts` equal pieces:
//
//   broadcast, all_gather        1 part that all read (the same block for everybody)
//   gather                       1 part, for the root
//   scatter, all_to_all,         n-1 parts, one for each peer
//   reduce_scatter
//
// One meeting a round: a rank copies in the pieces of round k+1, arrives, sees that all have
// arrived with those of round k, and takes them. The slowest rank of a round can catch up in the
// next. Four buffers used in turn suffice, as in all_reduce.cpp, note "Chunks overlap".
//
// Cost for blocks of B bytes and a buffer of C: ceil(B parts / C) meetings; a rank writes B parts
// into staging and reads what is meant for it, once. A lone block of at most 32 bytes travels in
// the line of the tick instead.
//
// Direct: where what all ranks send lies at the same place of the arena, each takes it from there,
// whole; one meeting before, one after, no staging.
//
// In place: a piece is read before anything is written at its place, as long as a rank's block from
// itself lies where its block to itself lies. A rank whose results lie where others read
// (all_to_all in place) does not ask for the direct way.
#include "copying.h"
#include "group.h"

namespace dure {

// One collective as seen by this rank: which block goes to, and comes from, each rank.
struct Group::Transfer {
    const Call& call;
    const int rank, size;
    const bool shared;  // one block for everybody
    const size_t parts;
    const size_t piece;         // bytes of a part
    ReduceFn kernel = nullptr;  // of reduce_scatter
    bool streams = false;       // see copying.h

    Transfer(const Call& c, int rank, int size, size_t chunk)
        : call(c),
          rank(rank),
          size(size),
          shared(c.op == Op::broadcast || c.op == Op::all_gather),
          parts(shared || c.op == Op::gather || size < 3 ? 1 : static_cast<size_t>(size) - 1),
          piece(chunk / parts / kLine * kLine) {
        size_t touched = 0;
        for (const Block& sent : c.inputs) touched += sent.bytes;
        for (const Block& result : c.outputs) touched += result.bytes;
        streams = c.op != Op::reduce_scatter && exceeds_cache(touched * Transfer::at(size));
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
    Block cut(Block block, size_t round) const {
        const size_t begin = round * piece;
        if (begin >= block.bytes) return {};
        return {block.data + begin, std::min(piece, block.bytes - begin)};
    }
    // What this rank sends, in the order of receivers.
    const std::vector<Block>& sent() const {
        return call.op == Op::broadcast ? call.outputs : call.inputs;
    }
    void copy(Block to, const std::byte* from) const {
        if (to.bytes == 0 || to.data == from) return;
        streams ? stream_copy(to.data, from, to.bytes) : void(std::memcpy(to.data, from, to.bytes));
    }
    void add_up(Block out, const void* const* from) const;
    static size_t at(int rank) { return static_cast<size_t>(rank); }
};

namespace {

bool overlap(Block a, Block b) { return a.data < b.data + b.bytes && b.data < a.data + a.bytes; }

}  // namespace

void Group::Transfer::add_up(Block out, const void* const* from) const {
    void* to[1] = {out.data};
    kernel({to, 1, from, size, out.bytes / item_bytes(call.dtype)});
}

// ---- through staging ----------------------------------------------------------------------------

// A lone block that fits travels in the sender's slot; sender and receiver see it there.
bool Group::inlined(const Transfer& t, int sender) const {
    const OpSlot& s = slot(sender);
    return t.parts == 1 && s.even && s.bytes <= kInlineBytes;
}

// Put this round's pieces into this rank's buffer.
void Group::put(const Transfer& t, size_t round) {
    std::byte* buffer = inlined(t, rank_) ? slot(rank_).inlined : stage(rank_, round);
    for (int peer = 0; peer < size_; peer++) {
        if (peer == rank_) continue;
        const Block piece = t.cut(t.to(peer), round);
        if (piece.bytes) std::memcpy(buffer + t.offset(rank_, peer), piece.data, piece.bytes);
        if (t.shared) break;
    }
}

// Where the round's piece from `peer` to this rank lies.
const std::byte* Group::source(const Transfer& t, int peer, size_t round) const {
    return (inlined(t, peer) ? slot(peer).inlined : stage(peer, round)) + t.offset(peer, rank_);
}

void Group::take(const Transfer& t, size_t round) {
    const std::byte* own = t.to(rank_).data + round * t.piece;
    if (t.kernel) {
        const Block out = t.cut(t.call.outputs[0], round);
        const void* from[kMaxRanks];
        for (int r = 0; r < size_; r++) from[r] = r == rank_ ? own : source(t, r, round);
        if (out.bytes) t.add_up(out, from);
        return;
    }
    // The own block first, which was read a moment ago; then not all from the same rank at once.
    for (int i = 0; i < size_; i++) {
        const int peer = (rank_ + i) % size_;
        t.copy(t.cut(t.from(peer), round), peer == rank_ ? own : source(t, peer, round));
    }
}

// The first round's pieces have been put and met for.
Status Group::move_staged(const Transfer& t) {
    const size_t rounds = std::max(most_bytes() + t.piece - 1, t.piece) / t.piece;
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

// ---- in the arena -------------------------------------------------------------------------------

// Where what this rank sends lies in the arena, if the others could take it from there; else 0.
uint64_t Group::place_of(const Transfer& t, std::shared_ptr<SharedBlock>* shared) const {
    if (arena_.empty() || t.call.op == Op::scatter) return 0;
    if (t.call.op == Op::broadcast && !t.streams) return 0;
    const std::vector<Block>& sent = t.sent();
    const Block all{sent[0].data, sent[0].bytes * sent.size()};
    if (all.bytes < kDirectBytes) return 0;
    for (size_t i = 0; i < sent.size(); i++) {
        if (sent[i].bytes != sent[0].bytes || sent[i].data != all.data + i * sent[0].bytes)
            return 0;
    }
    for (int peer = 0; peer < size_ && t.call.op != Op::broadcast; peer++) {
        const Block result = t.from(peer);
        const bool stays = peer == rank_ && result.data == t.to(rank_).data;
        if (!stays && result.bytes && overlap(result, all)) return 0;
    }
    return arena_.find(all.data, all.bytes, shared);
}

// What all ranks send lies at one place of the arena, and all ranks have arrived.
Status Group::move_direct(const Transfer& t, const SharedBlock& shared) {
    const std::vector<Block>& sent = t.sent();
    const size_t mine = sent.size() == 1 ? 0 : Transfer::at(rank_) * sent[0].bytes;
    const size_t offset = static_cast<size_t>(sent[0].data - shared.data()) + mine;
    if (t.kernel) {
        const void* from[kMaxRanks];
        for (int r = 0; r < size_; r++) from[r] = shared.region(r) + offset;
        t.add_up(t.call.outputs[0], from);
        return meet();
    }
    for (int i = 0; i < size_; i++) {
        const int peer = (rank_ + i) % size_;
        t.copy(t.from(peer), shared.region(peer) + offset);
    }
    return meet();
}

// Whether all ranks have announced that very place of the arena. Known after `open`.
Group::Sharing Group::sharing_of(uint64_t place) const {
    bool same = place != 0, some = false;
    for (int r = 0; r < size_; r++) {
        same = same && slot(r).arena == place && slot(r).even;
        some = some || slot(r).arena != 0;
    }
    return same ? Sharing::all : some ? Sharing::some : Sharing::none;
}

Status Group::move(const Call& call) {
    Transfer t(call, rank_, size_, chunk_);
    if (call.op == Op::reduce_scatter) {
        t.kernel = reduce_kernel(call.dtype, call.reduction);
        if (!t.kernel) return Status::usage;
    }
    std::shared_ptr<SharedBlock> shared;
    const uint64_t place = place_of(t, &shared);
    if (call.op == Op::broadcast)
        announce(call, call.outputs[0].bytes, place);
    else
        announce_blocks(call, place);
    if (place == 0) put(t, 0);
    if (Status s = open(); s != Status::ok) return s;
    const Sharing sharing = sharing_of(place);
    if (sharing == Sharing::all) return move_direct(t, *shared);
    if (sharing == Sharing::some) {
        if (place != 0) put(t, 0);
        if (Status s = meet(); s != Status::ok) return s;
    }
    return move_staged(t);
}

}  // namespace dure
