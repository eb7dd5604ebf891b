// The life of a group: making or mapping the segment, failing, leaving.
#include "group.h"

#include <unistd.h>

#include <algorithm>
#include <new>
#include <stdexcept>
#include <thread>

#include "channel.h"

namespace dure {

namespace {

constexpr int64_t kWriterNs = 5'000'000'000;

}  // namespace

std::unique_ptr<Group> Group::create(const Options& options, uint64_t nonce) {
    Layout layout(options.size);
    MemoryFile file = MemoryFile::create("dure-group", layout.total);
    std::shared_ptr<Mapping> mapping = file.map();
    auto* header = new (mapping->data()) Header{};
    header->magic = kMagic;
    header->nonce = nonce;
    header->protocol = kProtocol;
    header->size = static_cast<uint32_t>(options.size);
    header->chunk = options.cores < options.size ? kStageBytes : kSmallChunkBytes;
    std::unique_ptr<Group> group(new Group(options, std::move(file), std::move(mapping)));
    group->enter_rank();
    return group;
}

std::unique_ptr<Group> Group::attach(const Options& options, int pid, int fd, uint64_t nonce) {
    MemoryFile file = MemoryFile::open_of(pid, fd);
    std::shared_ptr<Mapping> mapping = file.map();
    auto* header = reinterpret_cast<Header*>(mapping->data());
    if (mapping->bytes() < sizeof(Header) || header->magic != kMagic || header->nonce != nonce) {
        throw std::runtime_error(
            "descriptor " + std::to_string(fd) + " of process " + std::to_string(pid) +
            " is not this group's segment; rank 0 may be in another PID namespace (container)");
    }
    if (header->protocol != kProtocol) {
        throw std::runtime_error("rank 0 runs another version of Dure: its segment has protocol " +
                                 std::to_string(header->protocol) + ", this rank speaks " +
                                 std::to_string(kProtocol));
    }
    if (mapping->bytes() != Layout(options.size).total) {
        throw std::runtime_error("rank 0 made a segment for " + std::to_string(header->size) +
                                 " ranks, this rank expects " + std::to_string(options.size));
    }
    file.close();
    std::unique_ptr<Group> group(new Group(options, std::move(file), std::move(mapping)));
    group->enter_rank();
    return group;
}

std::unique_ptr<Group> Group::join(const Options& options, const Group& first) {
    std::unique_ptr<Group> group(new Group(options, MemoryFile(), first.mapping_));
    group->enter_rank();
    return group;
}

Group::Group(const Options& options, MemoryFile file, std::shared_ptr<Mapping> mapping)
    : rank_(options.rank),
      size_(options.size),
      timeout_ns_(options.timeout_ns),
      oversubscribed_(options.cores < options.size),
      single_copies_(options.single_copies),
      migrates_(options.migrates),
      layout_(options.size),
      file_(std::move(file)),
      mapping_(std::move(mapping)),
      base_(mapping_->data()),
      heap_(SymmetricHeap::of_process(options.size)),
      processes_(static_cast<size_t>(options.size)) {
    if (options.cores < kChannels * options.size) core_lock_.emplace();
    for (int i = 0; i < kChannels; i++) {
        channels_[static_cast<size_t>(i)] = std::make_unique<Channel>(*this, i);
    }
}

Group::~Group() { close(); }

void Group::enter_rank() {
    RankBlock& mine = block(rank_);
    mine.pid = heap_.page().pid;
    mine.start_time = heap_.page().start_time;
    mine.heap_file = heap_.file();
    bring_copy_plan();
    mine.state.store(RankState::alive, std::memory_order_release);
    header().attached.fetch_add(1);
    futex_wake_all(header().attached);
}

int Group::attached() const { return static_cast<int>(header().attached.load()); }

std::vector<int> Group::not_attached() const {
    std::vector<int> out;
    for (int r = 0; r < size_; r++) {
        if (block(r).state.load(std::memory_order_acquire) == RankState::absent) out.push_back(r);
    }
    return out;
}

void Group::wait_attached(int64_t ns) const {
    uint32_t seen = header().attached.load();
    if (seen < static_cast<uint32_t>(size_)) futex_wait(header().attached, seen, ns);
}

void Group::ready() {
    watched_.emplace(where_);
    block(rank_).place.store(watched_->place());
    for (int r = 0; r < size_; r++) {
        const RankBlock& b = block(r);
        processes_[static_cast<size_t>(r)] = Process::of(b.pid, b.start_time, b.heap_file);
        if (!process(r) && !has_left(r)) {
            Outcome lost;
            lost.status = Status::peer_lost;
            lost.peer = r;
            lost.detail = "it ended while the group was being made";
            abort(std::move(lost));
        }
    }
    file_.close();
    agree_on_copies();
}

std::string Group::exit_of(int rank) const {
    const bool known = rank >= 0 && rank < size_ && process(rank);
    return known ? process(rank)->fate() : "";
}

int Group::pid_of(int rank) const {
    return rank >= 0 && rank < size_ && mapping_ ? block(rank).pid : 0;
}

Ring& Group::ring(int from, int to) const {
    size_t index = static_cast<size_t>(from) * layout_.size + static_cast<size_t>(to);
    return *reinterpret_cast<Ring*>(base_ + layout_.rings + index * layout_.ring_stride);
}

bool Group::has_left(int rank) const {
    return block(rank).state.load(std::memory_order_acquire) == RankState::left;
}

// ---- failing ------------------------------------------------------------------------------------

Status Group::abort(Outcome outcome) {
    AbortRecord& v = header().abort_record;
    uint32_t phase = 0;
    if (!v.phase.compare_exchange_strong(phase, kWriting + static_cast<uint32_t>(rank_))) {
        return adopt_abort();
    }
    v.status = outcome.status;
    v.op = outcome.op;
    v.channel = outcome.channel;
    v.seq = outcome.seq;
    v.peer = outcome.peer;
    v.reporter = rank_;
    for (int r : outcome.missing) v.missing[r / 64] |= uint64_t{1} << (r % 64);
    std::string text = outcome.detail;
    for (const std::string& call : outcome.calls) {
        text += '\n';
        text += call;
    }
    const size_t n = whole_characters(text, sizeof v.text - 1);
    std::memcpy(v.text, text.data(), n);
    v.text[n] = 0;
    // Fails where a peer has given up waiting for us.
    phase = kWriting + static_cast<uint32_t>(rank_);
    v.phase.compare_exchange_strong(phase, kReadable);
    wake_everyone();
    return adopt_abort();
}

Status Group::abort_after(const std::exception& error, int channel, uint32_t seq) noexcept {
    try {
        const bool memory = dynamic_cast<const std::bad_alloc*>(&error) != nullptr;
        Outcome out;
        out.status = Status::outside;
        out.channel = channel;
        out.seq = seq;
        out.detail = "rank " + std::to_string(rank_) +
                     (memory ? " has no memory left" : std::string(" failed: ") + error.what());
        return abort(std::move(out));
    } catch (const std::exception&) {
        return Status::internal;
    }
}

// Wait until the record has been written. That takes microseconds, but its writer can be kept from
// its core, stopped, or killed. False if it died, or did not come to an end in kWriterNs: then the
// record says so, to all.
bool Group::await_record() const {
    Word& phase = header().abort_record.phase;
    const int64_t deadline = now_ns() + kWriterNs;
    for (;;) {
        uint32_t now = phase.load(std::memory_order_acquire);
        if (now == kReadable) return true;
        if (now >= kGivenUp) return false;
        if (lost(static_cast<int>(now - kWriting)) || now_ns() > deadline) {
            phase.compare_exchange_strong(now, now - kWriting + kGivenUp);
            continue;
        }
        about_to_wait();
        std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
}

// Copy the segment's record into `failure_`, once. It is awaited without the lock, which others
// need to close the group, or to ask how it failed.
Status Group::adopt_abort() {
    AbortRecord& v = header().abort_record;
    {
        std::lock_guard hold(failure_lock_);
        if (failed_) return failure_.status;
    }
    const bool readable = await_record();
    std::lock_guard hold(failure_lock_);
    if (failed_) return failure_.status;
    Outcome out;
    if (readable) {
        out.status = v.status;
        out.op = v.op;
        out.channel = v.channel;
        out.seq = v.seq;
        out.peer = v.peer;
        out.reporter = v.reporter;
        for (int r = 0; r < size_; r++) {
            if (v.missing[r / 64] >> (r % 64) & 1) out.missing.push_back(r);
        }
        std::string text(v.text);
        for (size_t at = 0, end; at <= text.size(); at = end + 1) {
            end = std::min(text.find('\n', at), text.size());
            if (at == 0)
                out.detail = text.substr(0, end);
            else
                out.calls.push_back(text.substr(at, end - at));
        }
    } else {
        out.status = Status::peer_lost;
        out.peer = static_cast<int>(v.phase.load() - kGivenUp);
        out.detail = exit_of(out.peer);
        if (out.detail.empty()) out.detail = "it was stopped while it told why the group is broken";
    }
    failure_ = std::move(out);
    failed_ = true;
    return failure_.status;
}

Outcome Group::failure() const {
    std::lock_guard hold(failure_lock_);
    return failure_;
}

// ---- channel 0 ----------------------------------------------------------------------------------

Status Group::run(const Call& call) { return channel(0).run(call); }

Status Group::all_reduce(Block tensor, DType dtype, Reduction reduction) {
    Call call;
    call.op = Op::all_reduce;
    call.dtype = dtype;
    call.reduction = reduction;
    call.outputs = {tensor};
    return run(call);
}

std::shared_ptr<HeapMemory> Group::host_shared_empty(size_t bytes, Status& status,
                                                     const Site* site) {
    return channel(0).host_shared_empty(bytes, status, site, Channel::Turn(channel(0)));
}

// A tensor in a peer's heap (of node-shared memory, say) is named by the first rank of that
// process.
uint64_t Group::find_in_heap(const std::byte* data, size_t bytes) const {
    if (heap_.shares(data, bytes)) {
        return HeapPlace::of(rank_, static_cast<uint64_t>(data - heap_.base()));
    }
    for (int r = 0; r < size_; r++) {
        const std::shared_ptr<Process>& peer = process(r);
        if (r == rank_ || !peer || peer->heap() == heap_.base() || !peer->has(data)) continue;
        const auto offset = static_cast<uint64_t>(data - peer->heap());
        return bytes <= peer->heap_bytes() - offset ? HeapPlace::of(r, offset) : 0;
    }
    return 0;
}

// Make every sleeper of the group look again.
void Group::wake_everyone() const {
    for (int r = 0; r < size_; r++) {
        RankBlock& b = block(r);
        for (ChannelBlock& c : b.channel) {
            for (OpSlot& s : c.slot) futex_wake_all(s.tick);
        }
        b.bell.fetch_add(1);
        futex_wake_all(b.bell);
    }
}

// ---- leaving ------------------------------------------------------------------------------------

void Group::leave() {
    if (closing_.exchange(true)) return;
    block(rank_).state.store(RankState::left);
    wake_everyone();
}

void Group::close() {
    leave();
    // A thread that waits inside notices within one slice of its sleep.
    while (inside_.load() != 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
    {
        std::lock_guard hold(failure_lock_);
        if (!failed_) {
            failure_ = Outcome{};
            failure_.status = Status::aborted;
            failed_ = true;
        }
    }
    for (auto& channel : channels_) channel->stop();
    watched_.reset();
    file_.close();
}

void Group::release() {
    processes_.assign(static_cast<size_t>(size_), nullptr);
    mapping_.reset();
}

Outcome Group::outcome_of(Status status, Op op) const {
    Outcome out = status == Status::usage || status == Status::no_memory ? Outcome{} : failure();
    out.status = status;
    if (out.op == Op::none) out.op = op;
    return out;
}

}  // namespace dure
