// Which messages go through the ring, and which are copied once: learnt from the messages.
//
// Note "Learnt ways". A threshold cannot decide which way is quicker. On one processor the ring is
// quicker up to 64 KiB and from 1 MiB on, and a single copy is quicker between. It also depends on
// which core wrote the data last, on whether they are in a symmetric heap, and on when the receive
// is posted. So a sender tries both ways in turn with its first eight messages of a kind (a length,
// and heap or not) to a receiver, and again after every 1,024. The receiver measures each of them:
// from the later of the moments when the send began and when the receive was posted, until the data
// have arrived. It keeps the shortest time of each way, and sets a bit in the ring (`Ring::once`)
// if a single copy is quicker. An offer that no receive took in time, and that went through the
// ring, is not counted.
//
// Cost: 4 of 1,024 messages of a kind go the slower way.
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

// What a sender's frame says of a message that tries a way.
struct Trial {
    int64_t began_ns = 0;
    int16_t number = kNone;  // of the trial: even ones take the ring
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
        if (number >= kTries) return {(once >> kind & 1) != 0, {}};
        return {number % 2 == 1, {0, static_cast<int16_t>(number), kind}};
    }

  private:
    static constexpr uint32_t kTries = 8, kPeriod = 1024;
    std::array<uint32_t, kMessageKinds> sent_{};
};

// A receiver's side, for one sender.
class ReceivedWays {
  public:
    // Which kinds are to be copied once, after a trial's message of `bytes` that took `ns`.
    uint32_t note(const Trial& trial, size_t bytes, int64_t ns) {
        auto& least = least_[trial.kind];
        if (trial.number == 0) least.fill(kNever);
        float& this_way = least[static_cast<size_t>(trial.number % 2)];
        this_way = std::min(this_way, static_cast<float>(ns) / static_cast<float>(bytes));
        const uint32_t bit = uint32_t{1} << trial.kind;
        once_ = least[1] < least[0] ? once_ | bit : once_ & ~bit;
        return once_;
    }

  private:
    static constexpr float kNever = std::numeric_limits<float>::infinity();
    std::array<std::array<float, 2>, kMessageKinds> least_ = [] {
        std::array<std::array<float, 2>, kMessageKinds> never;
        for (auto& pair : never) pair.fill(kNever);
        return never;
    }();  // ns per byte, of this period
    uint32_t once_ = 0;
};

}  // namespace dure
