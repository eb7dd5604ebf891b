// Which messages go through the ring, and which are copied once: learnt from the messages.
//
// Note "Learnt ways". A threshold cannot decide which way is quicker. On one processor the ring is
// quicker up to 64 KiB and from 1 MiB on, and a single copy is quicker between. It also depends on
// which core wrote the data last, on whether they are in a symmetric heap, and on when the receive
// is posted. So a sender counts its messages of a kind (a length, and heap or not) to a receiver:
//
//     0 to 5      through the ring, the last four timed
//     6 to 11     copied once, the last four timed
//     12 on       the quicker way, until 1,024 have been counted; then from 0 on again
//
// Each way is taken twice before it is timed, because what one way leaves in the caches slows down
// the other: when the two took turns, messages of 1 MiB went the slower way (80 us in place of 58).
// The receiver times a message from the later of the moments when the send began and when the
// receive was posted, until the data have arrived. It leaves out the longest time of each way, and
// sets a bit in the ring (`Ring::once`) if a single copy saves an eighth of the ring's time: where
// less is at stake, two ranks that send to each other may find different ways, and then both are
// slower (1 MiB: 105 us, in place of 83 by the ring and 70 copied once). An offer that no receive
// took in time, and that went through the ring, is not counted.
//
// Cost: 6 of 1,024 messages of a kind go the slower way.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace dure {

constexpr size_t kLeastLearnt = 16 * 1024;  // shorter messages take the ring
constexpr size_t kMessageLengths = 10;      // powers of two; the last: all that exceed 8 MiB
constexpr size_t kMessageKinds = 2 * kMessageLengths;

// The kind of a message of more than kLeastLearnt bytes.
inline uint8_t message_kind(size_t bytes, bool in_heap) {
    const auto length = static_cast<size_t>(std::bit_width((bytes - 1) / kLeastLearnt)) - 1;
    return static_cast<uint8_t>(std::min(length, kMessageLengths - 1) +
                                (in_heap ? kMessageLengths : 0));
}

constexpr uint32_t kInARow = 6;   // messages that try a way
constexpr uint32_t kUntimed = 2;  // the first of them

// What a sender's frame says of a message that is timed.
struct Trial {
    int64_t began_ns = 0;
    int16_t number = kNone;  // of the message; from kInARow on it is copied once
    uint8_t kind = 0;
    static constexpr int16_t kNone = -1;
};

// How a message is to go.
struct MessageWay {
    bool once = false;
    Trial trial;
};

// A sender's side, for one receiver.
class SentWays {
  public:
    // The way of the next message of `kind`, where the receiver has shown `once`.
    MessageWay next(uint8_t kind, uint32_t once) {
        const uint32_t number = sent_[kind]++ % kPeriod;
        if (number >= 2 * kInARow) return {(once >> kind & 1) != 0, {}};
        const bool timed = number % kInARow >= kUntimed;
        return {number >= kInARow, {0, timed ? static_cast<int16_t>(number) : Trial::kNone, kind}};
    }

  private:
    static constexpr uint32_t kPeriod = 1024;
    std::array<uint32_t, kMessageKinds> sent_{};
};

// A receiver's side, for one sender.
class ReceivedWays {
  public:
    // Which kinds are to be copied once, after a timed message of `bytes` that took `ns`.
    uint32_t note(const Trial& trial, size_t bytes, int64_t ns) {
        auto& times = times_[trial.kind];
        const auto number = static_cast<uint32_t>(trial.number);
        if (number == kUntimed) times = {};
        times[number / kInARow].add(static_cast<float>(ns) / static_cast<float>(bytes));
        const bool once = times[1].mean() < kWorthIt * times[0].mean();
        const uint32_t bit = uint32_t{1} << trial.kind;
        once_ = once ? once_ | bit : once_ & ~bit;
        return once_;
    }

  private:
    static constexpr float kWorthIt = 0.875F;

    // Of the messages of a period that went one way, in ns per byte.
    struct Times {
        int count = 0;
        float sum = 0, longest = 0;

        void add(float time) {
            count++;
            sum += time;
            longest = std::max(longest, time);
        }

        // Without the longest, if there are others; a way that was not timed loses.
        float mean() const {
            if (count == 0) return std::numeric_limits<float>::infinity();
            return count == 1 ? sum : (sum - longest) / static_cast<float>(count - 1);
        }
    };

    std::array<std::array<Times, 2>, kMessageKinds> times_{};
    uint32_t once_ = 0;
};

}  // namespace dure
