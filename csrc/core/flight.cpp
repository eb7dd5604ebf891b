#include "flight.h"

namespace dure {

namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;

uint32_t pack(const Flight::Start& s) {
    return static_cast<uint32_t>(s.op) | static_cast<uint32_t>(s.dtype) << 8 |
           static_cast<uint32_t>(s.reduction) << 16 | static_cast<uint32_t>(s.async) << 24 |
           static_cast<uint32_t>(s.channel) << 25;
}

void unpack(uint32_t codes, Flight::Start& s) {
    s.op = static_cast<Op>(codes & 255);
    s.dtype = static_cast<DType>(codes >> 8 & 255);
    s.reduction = static_cast<Reduction>(codes >> 16 & 255);
    s.async = (codes >> 24 & 1) != 0;
    s.channel = static_cast<uint8_t>(codes >> 25);
}

}  // namespace

uint64_t Flight::begin(const Start& start) {
    const uint64_t number = last_.load(kRelaxed) + 1;
    last_.store(number, kRelaxed);
    Cell& c = cells_[number % kEntries];
    c.number.store(0, kRelaxed);
    std::atomic_thread_fence(std::memory_order_release);
    c.began.store(ticks(), kRelaxed);
    c.ended.store(0, kRelaxed);
    c.bytes.store(start.bytes, kRelaxed);
    c.site.store(start.site, kRelaxed);
    c.seq.store(start.seq, kRelaxed);
    c.peer.store(start.peer, kRelaxed);
    c.tag.store(start.tag, kRelaxed);
    c.codes.store(pack(start), kRelaxed);
    c.status.store(kRunning, kRelaxed);
    c.number.store(number, std::memory_order_release);
    return number;
}

void Flight::end(uint64_t number, Status status) {
    Cell& c = cells_[number % kEntries];
    if (c.number.load(kRelaxed) != number) return;
    c.ended.store(ticks(), kRelaxed);
    c.status.store(static_cast<uint8_t>(status), std::memory_order_release);
}

std::vector<Flight::Entry> Flight::entries() const {
    const TicksToTime clock;
    const uint64_t last = last_.load(kRelaxed);
    std::vector<Entry> out;
    for (uint64_t k = last < kEntries ? 1 : last - kEntries + 1; k <= last; k++) {
        const Cell& c = cells_[k % kEntries];
        Entry e;
        e.number = c.number.load(std::memory_order_acquire);
        e.status = c.status.load(std::memory_order_acquire);
        e.start.seq = c.seq.load(kRelaxed);
        unpack(c.codes.load(kRelaxed), e.start);
        e.start.peer = c.peer.load(kRelaxed);
        e.start.tag = c.tag.load(kRelaxed);
        e.start.bytes = c.bytes.load(kRelaxed);
        e.start.site = c.site.load(kRelaxed);
        e.start_ns = clock.ns(c.began.load(kRelaxed));
        const int64_t ended = c.ended.load(kRelaxed);
        e.end_ns = e.status == kRunning ? 0 : clock.ns(ended);
        std::atomic_thread_fence(std::memory_order_acquire);
        if (e.number == k && c.number.load(kRelaxed) == k) out.push_back(e);
    }
    return out;
}

}  // namespace dure
