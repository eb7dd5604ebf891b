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
// One meeting a round suffices, as buffers alternate: the buffer of round k is refilled in round
// k+2, after the meeting of round k+1, which a rank reaches only when it has left round k.
//
// Cost for blocks of B bytes and a buffer of C = 512 KiB: ceil(B parts / C) meetings; a rank writes
// B parts into staging and reads what is meant for it, once. A lone block of at most 32 bytes
// travels in the line of the tick instead.
//
// In place: a piece is read before anything is written at its place, as long as a rank's block from
// itself lies where its block to itself lies.
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

    Transfer(const Call& c, int rank, int size)
        : call(c),
          rank(rank),
          size(size),
          shared(c.op == Op::broadcast || c.op == Op::all_gather),
          parts(shared || c.op == Op::gather || size < 3 ? 1 : static_cast<size_t>(size) - 1),
          piece(kStageBytes / parts / kLine * kLine) {}

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
            default:
                return call.outputs[at(peer)];
        }
    }
    // Where in `sender`'s buffer the piece for `receiver` begins.
    size_t offset(int sender, int receiver) const {
        if (parts == 1) return 0;
        return static_cast<size_t>(receiver < sender ? receiver : receiver - 1) * piece;
    }
    static Block cut(Block block, size_t begin, size_t length) {
        if (begin >= block.bytes) return {};
        return {block.data + begin, std::min(length, block.bytes - begin)};
    }
    static size_t at(int rank) { return static_cast<size_t>(rank); }
};

// A lone block that fits travels in the sender's slot; sender and receiver see it there.
bool Group::inlined(const Transfer& t, int sender) const {
    const OpSlot& s = slot(sender);
    return t.parts == 1 && s.even && s.bytes <= kInlineBytes;
}

// Put the pieces that begin at `done` into this rank's buffer.
void Group::put(const Transfer& t, size_t done) {
    std::byte* buffer = inlined(t, rank_) ? slot(rank_).inlined : stage(rank_);
    for (int peer = 0; peer < size_; peer++) {
        if (peer == rank_) continue;
        Block piece = Transfer::cut(t.to(peer), done, t.piece);
        if (piece.bytes) std::memcpy(buffer + t.offset(rank_, peer), piece.data, piece.bytes);
        if (t.shared) break;
    }
}

// Where the current piece from `peer` to this rank lies.
const std::byte* Group::source(const Transfer& t, int peer) const {
    return (inlined(t, peer) ? slot(peer).inlined : stage(peer)) + t.offset(peer, rank_);
}

void Group::take(const Transfer& t, size_t done) {
    if (t.call.op == Op::reduce_scatter) {
        Block out = Transfer::cut(t.call.outputs[0], done, t.piece);
        if (!out.bytes) return;
        const void* from[kMaxRanks];
        void* to[1] = {out.data};
        for (int r = 0; r < size_; r++) {
            from[r] = r == rank_ ? t.to(r).data + done : source(t, r);
        }
        t.kernel({to, 1, from, size_, out.bytes / item_bytes(t.call.dtype)});
        return;
    }
    for (int peer = 0; peer < size_; peer++) {
        if (peer == rank_) continue;
        Block piece = Transfer::cut(t.from(peer), done, t.piece);
        if (piece.bytes) std::memcpy(piece.data, source(t, peer), piece.bytes);
    }
}

Status Group::move(const Call& call) {
    Transfer t(call, rank_, size_);
    if (call.op == Op::reduce_scatter) {
        t.kernel = reduce_kernel(call.dtype, call.reduction);
        if (!t.kernel) return Status::usage;
    }
    if (call.op == Op::broadcast)
        announce(call, call.outputs[0].bytes, 0);
    else
        announce_blocks(call);
    put(t, 0);
    if (Status s = open(); s != Status::ok) return s;
    if (call.op != Op::reduce_scatter) {
        const Block own = t.to(rank_), kept = t.from(rank_);
        if (own.bytes && own.data != kept.data) std::memmove(kept.data, own.data, kept.bytes);
    }
    const size_t most = most_bytes();
    for (size_t done = 0;;) {
        take(t, done);
        next_stage();
        done += t.piece;
        if (done >= most) return Status::ok;
        put(t, done);
        if (Status s = meet(); s != Status::ok) return s;
    }
}

}  // namespace dure
