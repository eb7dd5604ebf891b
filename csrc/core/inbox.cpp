// See the note "Inbox" in inbox.h.
#include "inbox.h"

#include <sched.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <new>

namespace dure {

namespace {

constexpr int64_t kBusyNs = 1'000'000;    // after a message, while more are expected soon
constexpr int64_t kSpinNs = 500'000;      // then one thread looks so long before it sleeps
constexpr int64_t kStretchNs = 4'000;     // without giving the core to somebody else
constexpr int64_t kContendedNs = 40'000;  // a yield that long: others need the core
constexpr int64_t kMostDozeNs = 200'000;
constexpr size_t kHead = sizeof(uint64_t);
constexpr uint32_t kPlaces = 16;  // of threads with tickets, and as many of threads without
constexpr uint32_t kTicketed = ~uint32_t{0} << kPlaces;

// A time on the page: never 0.
uint32_t stamp(int64_t ns) { return static_cast<uint32_t>(ns / 1000) | 1; }

size_t room_of(size_t bytes) { return kHead + (bytes + kHead - 1) / kHead * kHead; }

void copy_in(MessageRing& ring, uint64_t at, const std::byte* data, size_t bytes) {
    const size_t begin = at % kRingBytes;
    const size_t first = std::min(bytes, kRingBytes - begin);
    std::memcpy(ring.data + begin, data, first);
    std::memcpy(ring.data, data + first, bytes - first);
}

void copy_out(const MessageRing& ring, uint64_t at, std::byte* data, size_t bytes) {
    const size_t begin = at % kRingBytes;
    const size_t first = std::min(bytes, kRingBytes - begin);
    std::memcpy(data, ring.data + begin, first);
    std::memcpy(data + first, ring.data, bytes - first);
}

// Wake at most `most` of the threads that sleep under one of these bits.
void ring_bell(Word& bell, uint32_t bits, int most) {
    bell.fetch_add(1);
    syscall(SYS_futex, &bell, FUTEX_WAKE_BITSET, most, nullptr, nullptr, bits);
}

std::shared_ptr<HeapMemory> allocate() {
    auto memory = SymmetricHeap::of_process().allocate(sizeof(InboxPage), true);
    if (!memory) throw std::bad_alloc();
    return memory;
}

}  // namespace

// ---- receiving ----------------------------------------------------------------------------------

Inbox::Inbox() : memory_(allocate()), page_(*reinterpret_cast<InboxPage*>(memory_->data)) {
    page_.magic = kMagic;
}

uint64_t Inbox::offset() const {
    return static_cast<uint64_t>(memory_->data - SymmetricHeap::of_process().base());
}

void Inbox::wait(const std::shared_ptr<Ticket>& mine, int64_t deadline_ns) {
    std::lock_guard hold(lock_);
    if (served_by_ == std::this_thread::get_id()) {
        served_ns_ = 0;
        page_.served_us.store(0);
    }
    bool in_vain = false;  // has looked
    while (true) {
        const int64_t now = now_ns();
        const bool there = is_something_there(mine.get());
        const bool soon_back = !mine && !closed_ && now - served_ns_ < kBackNs;
        if (now >= deadline_ns || (there && !soon_back)) break;
        if (there)
            doze();
        else if ((!looking_ || (mine && looks_without_)) && !in_vain && now - last_ns_ < kBusyNs)
            in_vain = !look_around(mine != nullptr, std::min(now + kSpinNs, deadline_ns));
        else
            sleep(mine.get(), deadline_ns);
    }
    woken_++;
    woken_without_ += !mine;
    page_.wake.store(0);
}

Inbox::Got Inbox::take(const std::shared_ptr<Ticket>& mine, bool waited, std::string& message) {
    std::unique_lock hold(lock_, std::defer_lock);
    if (waited) {
        hold.lock();
        woken_--;
        woken_without_ -= !mine;
    } else if (!hold.try_lock()) {
        return Got::nothing;
    }
    const Got got = what_is_there(mine, message);
    if (got == Got::message && !mine) {
        served_ns_ = last_ns_;
        served_by_ = std::this_thread::get_id();
        page_.served_us.store(stamp(served_ns_));
    }
    if (got == Got::nothing && !waited) return got;
    // Somebody is to be woken by the next message, and by what is there.
    wake_for_posted();
    page_.wake.store(preferred());
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (const uint32_t bits = preferred(); bits && pending()) wake(bits, 1);
    return got;
}

Inbox::Got Inbox::what_is_there(const std::shared_ptr<Ticket>& mine, std::string& message) {
    if (closed_) return Got::closed;
    if (mine && mine->done) return Got::done;
    if (!mine && !posted_.empty()) {
        message = std::move(posted_.front());
        posted_.pop_front();
        last_ns_ = now_ns();
        return Got::message;
    }
    return read(message) ? Got::message : Got::nothing;
}

bool Inbox::is_something_there(const Ticket* mine) const {
    return closed_ || (mine ? mine->done : !posted_.empty()) || pending();
}

// With the lock: look at the rings for a while, without it, instead of whoever looks. False: in
// vain.
bool Inbox::look_around(bool ticketed, int64_t until_ns) {
    const uint64_t mine = ++look_;
    looking_ = true;
    looks_without_ = !ticketed;
    called_.store(false);
    page_.wake.store(0);
    lock_.unlock();
    int64_t yielded_ns = now_ns();
    bool found = false;
    while (!found) {
        for (int i = 0; i < 16 && !found; i++) {
            found = pending() || called_.load(std::memory_order_relaxed) ||
                    look_.load(std::memory_order_relaxed) != mine;
            relax();
        }
        const int64_t now = now_ns();
        if (now >= until_ns) break;
        if (now - yielded_ns < kStretchNs) continue;
        sched_yield();
        yielded_ns = now_ns();
        if (yielded_ns - now >= kContendedNs) break;
    }
    lock_.lock();
    if (look_.load() == mine) looking_ = false;
    return found || pending();
}

// With the lock: sleep without it, until there is a message or somebody calls.
void Inbox::sleep(Ticket* mine, int64_t deadline_ns) {
    const uint32_t place = next_place_++ % kPlaces + (mine ? kPlaces : 0);
    const uint32_t bit = uint32_t{1} << place;
    sleepers_[place]++;
    sleeping_ |= bit;
    if (mine) {
        mine->sleepers++;
        mine->bits |= bit;
    }
    page_.wake.store(preferred());
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const uint32_t seen = page_.bell.load();
    if (!pending()) {
        lock_.unlock();
        timespec until{deadline_ns / 1000000000, deadline_ns % 1000000000};
        syscall(SYS_futex, &page_.bell, FUTEX_WAIT_BITSET, seen, &until, nullptr, bit);
        lock_.lock();
    }
    if (mine && --mine->sleepers == 0) mine->bits = 0;
    if (--sleepers_[place] == 0) sleeping_ &= ~bit;
}

// With the lock: let a thread that serves a message come back for the next one.
void Inbox::doze() {
    const int64_t began_ns = served_ns_;
    doze_ns_ = std::clamp(doze_ns_, kBackNs, kMostDozeNs);
    const int64_t until_ns = began_ns + doze_ns_;
    dozing_ = true;
    page_.wake.store(preferred());
    lock_.unlock();
    timespec until{until_ns / 1000000000, until_ns % 1000000000};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr);
    lock_.lock();
    dozing_ = false;
    doze_ns_ = served_ns_ == began_ns ? kBackNs : 2 * doze_ns_;
}

// Of whom one is to be woken by a message.
uint32_t Inbox::preferred() const {
    if (looking_ || woken_) return 0;
    if (const uint32_t ticketed = sleeping_ & kTicketed) return ticketed;
    return dozing_ ? 0 : sleeping_;
}

// With the lock: tell a thread without a ticket, unless one comes by itself.
void Inbox::wake_for_posted() {
    if (posted_.empty() || dozing_ || woken_without_) return;
    if (const uint32_t bits = sleeping_ & ~kTicketed) wake(bits, 1);
}

void Inbox::wake(uint32_t bits, int most) { ring_bell(page_.bell, bits, most); }

bool Inbox::pending() const {
    for (const MessageRing& ring : page_.rings) {
        if (ring.written.load(std::memory_order_acquire) != ring.read.load()) return true;
    }
    return false;
}

bool Inbox::read(std::string& message) {
    for (int i = 0; i < kRings; i++) {
        MessageRing& ring = page_.rings[(first_ + i) % kRings];
        const uint64_t read = ring.read.load(std::memory_order_relaxed);
        const uint64_t shown = ring.written.load(std::memory_order_acquire) - read;
        if (shown < kHead || shown > kRingBytes) continue;
        uint64_t bytes;
        copy_out(ring, read, reinterpret_cast<std::byte*>(&bytes), kHead);
        if (bytes > kMostBytes || room_of(bytes) > shown) continue;  // a sender that is not ours
        message.resize(bytes);
        copy_out(ring, read + kHead, reinterpret_cast<std::byte*>(message.data()), bytes);
        ring.read.store(read + room_of(bytes), std::memory_order_release);
        first_ = (first_ + i + 1) % kRings;
        last_ns_ = now_ns();
        return true;
    }
    return false;
}

void Inbox::complete(const std::shared_ptr<Ticket>& ticket) {
    std::lock_guard hold(lock_);
    ticket->done = true;
    called_.store(true);  // it may be the one that looks
    if (ticket->bits) wake(ticket->bits, INT_MAX);
}

void Inbox::post(std::string message) {
    std::lock_guard hold(lock_);
    posted_.push_back(std::move(message));
    called_.store(true);
    wake_for_posted();
}

void Inbox::close() {
    std::lock_guard hold(lock_);
    closed_ = true;
    called_.store(true);
    wake(~uint32_t{0}, INT_MAX);
}

bool Inbox::forget(int pid) {
    for (MessageRing& ring : page_.rings) {
        if (ring.sender.load() != static_cast<uint32_t>(pid)) continue;
        if (ring.written.load() != ring.read.load()) return false;
        ring.sender.store(0);
    }
    return true;
}

// ---- sending ------------------------------------------------------------------------------------

std::shared_ptr<Outbox> Outbox::claim(const std::shared_ptr<Process>& peer, uint64_t offset) {
    if (offset % 64 != 0 || offset + sizeof(InboxPage) > peer->heap_bytes()) return nullptr;
    auto& page = *reinterpret_cast<InboxPage*>(peer->heap() + offset);
    if (page.magic != Inbox::kMagic) return nullptr;
    for (MessageRing& ring : page.rings) {
        uint32_t nobody = 0;
        if (ring.sender.compare_exchange_strong(nobody, static_cast<uint32_t>(getpid())))
            return std::shared_ptr<Outbox>(new Outbox(peer, page, ring));
    }
    return nullptr;
}

Outbox::~Outbox() {
    if (getpid() != pid_) return;
    // What was written is still read: the reader looks at all rings, whoever has them.
    ring_.sender.store(0);
}

bool Outbox::send(const std::byte* data, size_t bytes, bool patient) {
    if (bytes > kMostBytes) return false;
    std::lock_guard hold(lock_);
    const uint64_t written = ring_.written.load(std::memory_order_relaxed);
    const uint64_t used = written - ring_.read.load(std::memory_order_acquire);
    if (used > kRingBytes || kRingBytes - used < room_of(bytes)) return false;
    if (used == 0) due_ns_.store(INT64_MAX);  // all that was sent before was read
    const uint64_t head = bytes;
    copy_in(ring_, written, reinterpret_cast<const std::byte*>(&head), kHead);
    copy_in(ring_, written + kHead, data, bytes);
    ring_.written.store(written + room_of(bytes), std::memory_order_release);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (page_.wake.load(std::memory_order_relaxed) == 0) return true;
    if (const uint32_t served_us = page_.served_us.load(); patient && served_us) {
        const int64_t now = now_ns();
        if (stamp(now) - served_us < kBackNs / 1000) {
            // Who serves a short call finds this when it is back.
            if (due_ns_.load() == INT64_MAX) due_ns_.store(now + kBackNs);
            return true;
        }
    }
    ring();
    return true;
}

void Outbox::remind() {
    due_ns_.store(INT64_MAX);
    if (ring_.written.load() != ring_.read.load() && page_.wake.load() != 0) ring();
}

int64_t Outbox::due_ns() const { return due_ns_.load(); }

// One ring of the bell is enough, until somebody sleeps or leaves again.
void Outbox::ring() {
    if (const uint32_t bits = page_.wake.exchange(0)) ring_bell(page_.bell, bits, 1);
}

}  // namespace dure
