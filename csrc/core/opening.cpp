// The opening of a collective: say what was called, meet, compare.
//
// Note "Signature". Before a rank arrives it writes into its slot what it called: operation, dtype,
// reduction, root, bytes. Operations that move a block for each pair of ranks also write a table,
// the bytes they send to and expect from each rank. When all have arrived everyone compares
// everything with its own, so that all ranks come to the same verdict, and none has touched user
// data yet. In the usual case (all blocks alike) that is 16 bytes a rank, in the line that was read
// for the tick anyway; the tables are read only if some rank says that its blocks differ.
#include <algorithm>
#include <cstdio>

#include "group.h"

namespace dure {

uint64_t* Group::table(int rank) const {
    size_t index = static_cast<size_t>(rank) * 2 + (seq_ & 1);
    return reinterpret_cast<uint64_t*>(base_ + layout_.tables + index * layout_.table_stride);
}

// Begin operation number seq_ + 1. The slot is ours until we arrive.
void Group::announce(const Call& call, size_t bytes, uint64_t arena) {
    seq_++;
    op_ = call.op;
    started_ns_ = 0;
    OpSlot& s = slot(rank_);
    s.seq = seq_;
    s.op = call.op;
    s.dtype = call.dtype;
    s.reduction = call.reduction;
    s.even = 1;
    s.root = call.root;
    s.bytes = bytes;
    s.arena = arena;
    if (call.site != shown_[seq_ & 1]) show_site(call.site);
}

// Where the call was made is text, so it is written only when it changes: a loop that calls from
// one line writes it twice.
void Group::show_site(const Site* site) {
    char* text = block(rank_).site[seq_ & 1];
    const size_t n = site ? whole_characters(site->text, kSiteBytes - 1) : 0;
    if (n) std::memcpy(text, site->text.data(), n);
    text[n] = 0;
    shown_[seq_ & 1] = site;
}

// As `announce`, for operations on a block for each pair of ranks.
void Group::announce_blocks(const Call& call, uint64_t arena) {
    announce(call, 0, arena);
    const auto n = static_cast<size_t>(size_), me = static_cast<size_t>(rank_);
    const auto root = static_cast<size_t>(call.root);
    const bool rooted = call.op == Op::gather || call.op == Op::scatter;
    uint64_t* send = table(rank_);
    uint64_t* receive = send + n;
    uint64_t common = 0;
    bool first = true, even = true;
    auto note = [&](uint64_t& cell, const std::vector<Block>& list, size_t i, bool used) {
        cell = !used || list.empty() ? 0 : list[list.size() == 1 ? 0 : i].bytes;
        if (!used) return;
        if (first)
            common = cell;
        else if (cell != common)
            even = false;
        first = false;
    };
    for (size_t i = 0; i < n; i++) {
        bool sends = !rooted || (call.op == Op::gather ? i == root : me == root);
        bool receives = !rooted || (call.op == Op::gather ? me == root : i == root);
        note(send[i], call.inputs, i, sends);
        note(receive[i], call.outputs, i, receives);
    }
    OpSlot& s = slot(rank_);
    s.even = even;
    s.bytes = even ? common : 0;
}

bool Group::same_call(int rank) const {
    const OpSlot &a = slot(rank_), &b = slot(rank);
    // op, dtype, reduction lie side by side; `even` may differ.
    return a.seq == b.seq && a.op == b.op && a.dtype == b.dtype && a.reduction == b.reduction &&
           a.root == b.root;
}

// Arrive, wait for all, and compare. User data must not have changed before.
Status Group::open() {
    if (Status s = meet(); s != Status::ok) return s;
    bool same = true, even = true;
    for (int r = 0; r < size_; r++) {
        same = same && same_call(r);
        even = even && slot(r).even;
    }
    if (same && even) {
        for (int r = 0; r < size_; r++) same = same && slot(r).bytes == slot(rank_).bytes;
    } else if (same) {
        same = check_blocks() == Status::ok;
    }
    return same ? Status::ok : report_desync();
}

Status Group::check_blocks() const {
    for (int from = 0; from < size_; from++) {
        for (int to = 0; to < size_; to++) {
            if (send_bytes(from, to) != table(to)[size_ + from]) return Status::desync;
        }
    }
    return Status::ok;
}

size_t Group::send_bytes(int from, int to) const { return table(from)[to]; }

// The longest block that any rank sends to another; known after `open`.
size_t Group::most_bytes() const {
    bool even = true;
    for (int r = 0; r < size_; r++) even = even && slot(r).even;
    if (even) return slot(rank_).bytes;
    size_t most = 0;
    for (int from = 0; from < size_; from++) {
        for (int to = 0; to < size_; to++) most = std::max(most, send_bytes(from, to));
    }
    return most;
}

// "float32[1000]", or the lengths of all blocks where they differ.
std::string Group::describe_blocks(int rank) const {
    const OpSlot& s = slot(rank);
    const size_t item = item_bytes(s.dtype);
    std::string text = name_of(s.dtype);
    if (s.even) return text.append("[").append(std::to_string(s.bytes / item)).append("]");
    auto list = [&](const char* what, const uint64_t* cells) {
        text.append(what);
        for (int i = 0; i < size_; i++) {
            text.append(i ? ", " : "").append(std::to_string(cells[i] / item));
        }
        text.append("]");
    };
    list(", sends [", table(rank));
    list(", receives [", table(rank) + size_);
    return text;
}

std::string Group::describe_call(int rank) const {
    const OpSlot& s = slot(rank);
    std::string text = name_of(s.op);
    text.append("(");
    if (s.op == Op::shared_empty || s.op == Op::host_shared_empty)
        text.append(std::to_string(s.bytes)).append(" bytes");
    else if (s.op != Op::barrier)
        text.append(describe_blocks(rank));
    if (s.reduction != Reduction::none) text.append(", ").append(name_of(s.reduction));
    if (s.root >= 0) text.append(", root ").append(std::to_string(s.root));
    text.append(")");
    const char* site = block(rank).site[seq_ & 1];
    if (site[0]) text.append(" at ").append(site, strnlen(site, kSiteBytes));
    return text;
}

Status Group::report_desync() {
    Outcome out;
    out.status = Status::desync;
    out.op = op_;
    out.seq = seq_;
    for (int r = 0; r < size_; r++) {
        out.calls.push_back(describe_call(r));
        if (out.peer < 0 && out.calls.back() != out.calls.front()) out.peer = r;
    }
    return condemn(std::move(out));
}

}  // namespace dure
