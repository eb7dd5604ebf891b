// The flight recorder: the last operations of a group, for those who look after an accident.
//
// Note "Flight". A ring of entries, one for each operation, in the order of the calls. Whoever
// calls an operation writes its entry (`begin`); whoever ends it, maybe another thread, writes the
// end, unless the entry was overwritten meanwhile. A reader copies entries without stopping
// anybody, so an entry's number is written last and compared again after copying. Cost: two
// readings of the processor's counter and one cache line, some 15 ns an operation.
//
// Threads: one thread at a time begins (in Python, it holds the GIL); any thread ends and reads.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "ticks.h"
#include "types.h"

namespace dure {

class Flight {
  public:
    static constexpr size_t kEntries = 2048;
    static constexpr uint8_t kRunning = 255;  // of `status`: has not ended

    // What was called. `peer` is the root, or the other rank of a message; -1 if there is none.
    struct Start {
        Op op = Op::none;
        DType dtype = DType::opaque;
        Reduction reduction = Reduction::none;
        bool async = false;
        uint8_t channel = 0;
        uint32_t seq = 0;  // of the collective in its channel, from 1; 0 of a message
        int32_t peer = -1;
        int32_t tag = 0;
        uint64_t bytes = 0;
        const Site* site = nullptr;
    };
    struct Entry {
        Start start;
        uint64_t number = 0;  // of the entry, from 1
        uint8_t status = kRunning;
        int64_t start_ns = 0, end_ns = 0;  // on the monotonic clock; 0: not yet
    };

    Flight() : cells_(new Cell[kEntries]) {}

    // Returns the entry's number, for `end`.
    uint64_t begin(const Start& start);
    void end(uint64_t number, Status status);
    // What the ring holds, oldest first.
    std::vector<Entry> entries() const;

  private:
    struct alignas(64) Cell {
        std::atomic<uint64_t> number{0};
        std::atomic<int64_t> began{0}, ended{0};
        std::atomic<uint64_t> bytes{0};
        std::atomic<const Site*> site{nullptr};
        std::atomic<uint32_t> seq{0};
        std::atomic<int32_t> peer{0}, tag{0};
        std::atomic<uint32_t> codes{0};  // op, dtype, reduction, channel and async
        std::atomic<uint8_t> status{0};
    };
    static_assert(sizeof(Cell) == 64);

    std::unique_ptr<Cell[]> cells_;
    std::atomic<uint64_t> last_{0};
};

}  // namespace dure
