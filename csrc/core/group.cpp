// The life of a group: making or mapping the segment, failing, leaving.
#include "group.h"

#include <unistd.h>

#include <stdexcept>
#include <thread>

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
      crowded_(options.cores < options.size),
      layout_(options.size),
      file_(std::move(file)),
      mapping_(std::move(mapping)),
      base_(mapping_->data()),
      chunk_(header().chunk) {}

Group::~Group() { close(); }

void Group::enter_rank() {
    RankBlock& mine = block(rank_);
    mine.pid = getpid();
    mine.start_time = start_time_of(mine.pid);
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
    for (int r = 0; r < size_; r++) {
        RankBlock& b = block(r);
        if (!peers_.add(b.pid, b.start_time, b.pid == getpid()) &&
            b.state.load(std::memory_order_acquire) != RankState::left) {
            Outcome lost;
            lost.status = Status::peer_lost;
            lost.peer = r;
            lost.detail = "it ended while the group was being made";
            condemn(std::move(lost));
        }
    }
    file_.close();
    watcher_.start(block(rank_), mapping_);
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

Status Group::condemn(Outcome outcome) {
    Verdict& v = header().verdict;
    uint32_t whole = 0;
    if (!v.phase.compare_exchange_strong(whole, kWriting + rank_)) return adopt_verdict();
    v.status = outcome.status;
    v.op = outcome.op;
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
    v.phase.store(kReadable, std::memory_order_release);
    wake_everyone();
    return adopt_verdict();
}

// Wait until the verdict has been written. That takes microseconds, but its writer can be kept from
// its core, stopped, or killed. False if it died, or did not come to an end in kWriterNs.
bool Group::await_verdict() const {
    const Word& phase = header().verdict.phase;
    const int64_t deadline = now_ns() + kWriterNs;
    for (;;) {
        const uint32_t now = phase.load(std::memory_order_acquire);
        if (now == kReadable) return true;
        const bool over = lost(static_cast<int>(now - kWriting)) || now_ns() > deadline;
        if (over) return phase.load(std::memory_order_acquire) == kReadable;
        about_to_wait();
        std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
}

// Copy the segment's verdict into `failure_`, once.
Status Group::adopt_verdict() {
    Verdict& v = header().verdict;
    std::lock_guard hold(failure_lock_);
    if (failed_) return failure_.status;
    const bool readable = await_verdict();
    Outcome out;
    if (readable) {
        out.status = v.status;
        out.op = v.op;
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
        out.peer = static_cast<int>(v.phase.load() - kWriting);
        out.detail = fate_of(out.peer);
    }
    failure_ = std::move(out);
    failed_ = true;
    return failure_.status;
}

Outcome Group::failure() const {
    std::lock_guard hold(failure_lock_);
    return failure_;
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
    watcher_.stop();
    file_.close();
}

void Group::release() {
    peers_.close();
    mapping_.reset();
}

Outcome Group::outcome_of(Status status, Op op) const {
    Outcome out = status == Status::usage || status == Status::no_memory ? Outcome{} : failure();
    out.status = status;
    if (out.op == Op::none) out.op = op;
    return out;
}

}  // namespace dure
