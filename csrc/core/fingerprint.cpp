// The header exchange of a collective: say what was called, arrive, compare.
//
// Note "Fingerprint". Before a rank arrives it writes into its slot what it called: operation,
// dtype, reduction, root or subject, bytes. Operations that move a block for each pair of ranks
// also write a table, the bytes they send to and expect from each rank. When all have arrived
// everyone compares everything with its own, so that all ranks come to the same result, and none
// has touched user data yet. In the usual case (all blocks alike) that is 16 bytes a rank, in the
// line that was read for the tick anyway; the tables are read only if some rank says that its
// blocks differ.
//
// The peers have read the line of the next operation's slot, so to write it is to call it back from
// their cores first, which takes as long as a peer takes to see what was written. It is called back
// as soon as all have arrived here: then nobody reads it any more (layout.h tells why), and it
// comes while the program prepares its next call.
#include <algorithm>
#include <cstdio>

#include "channel.h"

namespace dure {

uint64_t* Channel::table(int rank) const {
    size_t index = static_cast<size_t>(rank) * 2 + (seq_ & 1);
    return reinterpret_cast<uint64_t*>(tables_ + index * group_.layout().table_stride);
}

namespace {

constexpr int32_t kSubjects = INT32_MIN;  // and 2^30 numbers above it are subjects' codes

// One number for what only some operations have: a root; below -1 the dtype that a reduce_scatter
// converts into; or the code of what the call is about. Those with a root are compared by that.
int32_t root_of(const Call& call) {
    if (call.converts()) return -2 - static_cast<int32_t>(call.into);
    if (call.root >= 0 || call.subject.code == 0) return call.root;
    return kSubjects + static_cast<int32_t>(call.subject.code);
}

bool is_subject(int32_t root) { return root < kSubjects / 2; }

// Texts in the segment are words, so that who reads them while they change reads something.
template <size_t kWords>
void store_text(std::atomic<uint64_t> (&words)[kWords], const std::string* text) {
    char bytes[kWords * 8] = {};
    const size_t n = text ? whole_characters(*text, sizeof bytes - 1) : 0;
    if (n) std::memcpy(bytes, text->data(), n);
    for (size_t i = 0; i < kWords; i++) {
        uint64_t word = 0;
        std::memcpy(&word, bytes + 8 * i, 8);
        words[i].store(word, std::memory_order_relaxed);
    }
}

template <size_t kWords>
std::string load_text(const std::atomic<uint64_t> (&words)[kWords]) {
    char bytes[kWords * 8];
    for (size_t i = 0; i < kWords; i++) {
        const uint64_t word = words[i].load(std::memory_order_relaxed);
        std::memcpy(bytes + 8 * i, &word, 8);
    }
    return {bytes, strnlen(bytes, sizeof bytes)};
}

}  // namespace

// Begin operation number seq_ + 1. The slot is ours until we arrive.
void Channel::write_header(const Call& call, size_t bytes, uint64_t heap) {
    seq_++;
    op_ = call.op;
    started_ns_ = 0;
    OpSlot& s = slot(rank_);
    s.seq = seq_;
    s.op = call.op;
    s.dtype = call.dtype;
    s.reduction = call.reduction;
    s.even = 1;
    s.root = root_of(call);
    s.bytes = bytes;
    s.heap = heap;
    if (call.reduction == Reduction::premul_sum) s.factor = call.factor;
    if (call.site != shown_[seq_ & 1] || call.thread != shown_thread_[seq_ & 1]) show_place(call);
    if (is_subject(s.root) && call.subject.code != shown_subject_[seq_ & 1]) {
        store_text(block(rank_).subject[seq_ & 1], call.subject.text);
        shown_subject_[seq_ & 1] = call.subject.code;
    }
}

// Where the call was made is text, so it is written only when it changes: a loop that calls from
// one line writes it twice.
void Channel::show_place(const Call& call) {
    ChannelBlock& mine = block(rank_);
    const size_t at = seq_ & 1;
    store_text(mine.site[at], call.site ? &call.site->text : nullptr);
    store_text(mine.thread[at], call.thread);
    shown_[at] = call.site;
    shown_thread_[at] = call.thread;
}

std::string Channel::thread_of(int rank, size_t slot) const {
    return load_text(block(rank).thread[slot]);
}

// "train.py:31 in step", and the thread where the program has named it.
std::string Channel::site_of(int rank, size_t slot) const {
    std::string text = load_text(block(rank).site[slot]);
    const std::string thread = thread_of(rank, slot);
    if (!thread.empty()) text.append(", thread ").append(thread);
    return text;
}

// As `write_header`, for operations on a block for each pair of ranks.
void Channel::write_block_header(const Call& call, uint64_t heap) {
    write_header(call, 0, heap);
    const auto n = static_cast<size_t>(size_), me = static_cast<size_t>(rank_);
    const auto root = static_cast<size_t>(call.root);
    const bool rooted = call.op == Op::gather || call.op == Op::scatter;
    uint64_t* send = table(rank_);
    uint64_t* receive = send + n;
    uint64_t common = 0;
    bool first = true, even = true;
    // Lengths are compared as those of the inputs' dtype.
    const size_t given = item_bytes(call.dtype), taken = item_bytes(call.result());
    auto note = [&](uint64_t& cell, const std::vector<Block>& list, size_t i, bool used) {
        cell = !used || list.empty() ? 0 : list[list.size() == 1 ? 0 : i].bytes;
        if (call.converts() && &list == &call.outputs) cell = cell / taken * given;
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

bool Channel::same_call(int rank) const {
    const OpSlot &a = slot(rank_), &b = slot(rank);
    // op, dtype, reduction lie side by side; `even` may differ.
    return a.seq == b.seq && a.op == b.op && a.dtype == b.dtype && a.reduction == b.reduction &&
           a.root == b.root;
}

// Arrive, wait for all, and compare. User data must not have changed before.
Status Channel::exchange_headers() {
    all_begun_ = false;
    if (Status s = barrier(); s != Status::ok) return s;
    all_begun_ = true;
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
    fetch_to_write(&block(rank_).slot[(seq_ + 1) & 1]);
    if (!same) return report_desync();
    return group_.threads_seen() == 0 ? Status::ok : check_threads();
}

Status Channel::check_blocks() const {
    for (int from = 0; from < size_; from++) {
        for (int to = 0; to < size_; to++) {
            if (send_bytes(from, to) != table(to)[size_ + from]) return Status::desync;
        }
    }
    return Status::ok;
}

size_t Channel::send_bytes(int from, int to) const { return table(from)[to]; }

// The longest block that a rank sends or receives, by its own word.
size_t Channel::longest_block(int rank) const {
    if (slot(rank).even) return slot(rank).bytes;
    return *std::max_element(table(rank), table(rank) + 2 * size_);
}

// The longest block that any rank sends to another; known after `exchange_headers`.
size_t Channel::most_bytes() const {
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
std::string Channel::describe_blocks(int rank) const {
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

// "[0, 2]", or a number for what has too many ranks, or is several groups.
static std::string describe_members(uint64_t members) {
    char digest[32];
    std::snprintf(digest, sizeof digest, "ranks #%llx",
                  static_cast<unsigned long long>(members & (kDigest - 1)));
    if (members & kDigest) return digest;
    std::string text;
    for (int r = 0; r < 63; r++) {
        if (members >> r & 1) text.append(text.empty() ? "[" : ", ").append(std::to_string(r));
    }
    return text.append("]");
}

std::string Channel::describe_call(int rank) const {
    const OpSlot& s = slot(rank);
    std::string text = name_of(s.op);
    text.append("(");
    if (s.op == Op::host_shared_empty)
        text.append(std::to_string(s.bytes)).append(" bytes");
    else if (s.op == Op::new_group)
        text.append(describe_members(s.bytes));
    else if (s.op != Op::barrier)
        text.append(describe_blocks(rank));
    if (s.reduction != Reduction::none) text.append(", ").append(name_of(s.reduction));
    if (s.root >= 0) text.append(", root ").append(std::to_string(s.root));
    if (s.root < -1 && !is_subject(s.root))
        text.append(", into ").append(name_of(static_cast<DType>(-2 - s.root)));
    text.append(")");
    const std::string site = site_of(rank, seq_ & 1);
    if (!site.empty()) text.append(" at ").append(site);
    if (is_subject(s.root)) text.append(", of ").append(load_text(block(rank).subject[seq_ & 1]));
    return text;
}

Status Channel::report_desync() {
    Outcome out;
    out.status = Status::desync;
    out.op = op_;
    out.channel = index_;
    out.seq = seq_;
    for (int r = 0; r < size_; r++) {
        out.calls.push_back(describe_call(r));
        if (out.peer < 0 && out.calls.back() != out.calls.front()) out.peer = r;
    }
    return group_.abort(std::move(out));
}

}  // namespace dure
