// Epochs of reading and writing of memory that all ranks share: the protocol of
// `dure.training.epochs`, with the same words and the same call. With random delays no rank sees a
// partly written row, or one of another step; and the thread sanitizer finds no unordered access.
#include <array>
#include <atomic>
#include <memory>
#include <random>

#include "channel.h"
#include "harness.h"
#include "signals.h"

namespace dure {
namespace {

using namespace dure::testing;

constexpr int kMostRanks = 3, kRow = 24;

enum class Guard { none, begin_read, end_read };

struct Shared {
    std::array<std::array<Word, kMostRanks>, kMostRanks> left{};  // [waiting rank][peer]
    struct alignas(64) Row {
        volatile uint64_t values[kRow];
        volatile uint64_t wrote;  // odd while its rank writes
    };
    std::array<Row, kMostRanks> rows{};
    std::atomic<int64_t> torn{0};
};

// One rank's epochs, without one of the guards.
class Epochs {
  public:
    Epochs(Group& group, Shared& shared, Guard missing)
        : group_(group), shared_(shared), missing_(missing) {}

    void begin_read() {
        await_readers();
        end_write();
        if (missing_ != Guard::begin_read) {
            std::array<uint8_t, 5> token{};
            Call call{Op::all_reduce,
                      DType::u8,
                      Reduction::bxor,
                      -1,
                      {},
                      {{reinterpret_cast<std::byte*>(token.data()), token.size()}}};
            CHECK(group_.channel(0).run(call) == Status::ok);
        }
        reading_ = true;
    }

    void end_read(bool together) {
        if (reading_) {
            reading_ = false;
            awaiting_ = missing_ != Guard::end_read;
            for (int peer = 0; awaiting_ && peer < group_.size(); peer++) {
                if (peer != group_.rank()) await_change(word(peer, group_.rank()), 0, 1, patient);
            }
        }
        if (together) await_readers();
    }

    void begin_write() {
        end_read(true);
        if (wrote() % 2 == 0) wrote() = wrote() + 1;
    }

    void end_write() {
        if (wrote() % 2 == 1) wrote() = wrote() + 1;
    }

    volatile uint64_t& wrote() { return row(group_.rank()).wrote; }

  private:
    static int patient() { return 0; }
    Shared::Row& row(int rank) { return shared_.rows[static_cast<size_t>(rank)]; }
    Word& word(int waits, int left) {
        return shared_.left[static_cast<size_t>(waits)][static_cast<size_t>(left)];
    }

    void await_readers() {
        if (!awaiting_) return;
        awaiting_ = false;
        for (int peer = 0; peer < group_.size(); peer++) {
            if (peer != group_.rank()) await_change(word(group_.rank(), peer), 1, 0, patient);
        }
    }

    Group& group_;
    Shared& shared_;
    const Guard missing_;
    bool reading_ = false, awaiting_ = false;
};

uint64_t value_of(uint64_t step, int rank, int i) {
    return step * 1'000 + static_cast<uint64_t>(rank * kRow + i);
}

// Mostly no delay, sometimes some microseconds, rarely a sleep in which other ranks run.
void dawdle(std::mt19937& random) {
    const uint32_t dice = random() % 64;
    if (dice == 0) usleep(20);
    for (uint32_t i = dice < 16 ? random() % 512 : 0; i > 0; i--) relax();
}

// How many reads are torn in `steps` of `size` ranks.
int64_t torn_reads(int size, uint64_t steps, Guard missing) {
    auto shared = std::make_unique<Shared>();
    for (int rank = 0; rank < size; rank++) {
        for (int i = 0; i < kRow; i++) {
            shared->rows[static_cast<size_t>(rank)].values[i] = value_of(0, rank, i);
        }
    }
    on_threads(size, [&](Group& group) {
        std::mt19937 random(static_cast<uint32_t>(group.rank()));
        Epochs epochs(group, *shared, missing);
        const auto look = [&](uint64_t step) {
            for (int rank = 0; rank < size; rank++) {
                const Shared::Row& row = shared->rows[static_cast<size_t>(rank)];
                bool valid = row.wrote == 2 * step;
                for (int i = 0; i < kRow; i++) {
                    valid = valid && row.values[i] == value_of(step, rank, i);
                }
                if (!valid) shared->torn++;
            }
        };
        for (uint64_t step = 0; step < steps; step++) {
            epochs.begin_read();
            look(step);
            dawdle(random);
            look(step);
            epochs.end_read(random() % 2 == 0);  // after a forward alone no rank waits
            dawdle(random);
            epochs.begin_write();
            for (int i = 0; i < kRow; i++) {
                if (i == kRow / 2) dawdle(random);
                shared->rows[static_cast<size_t>(group.rank())].values[i] =
                    value_of(step + 1, group.rank(), i);
            }
            if (random() % 2 == 0) epochs.end_write();  // else `begin_read` does
        }
        group.close();
    });
    return shared->torn;
}

TEST(no_rank_reads_what_another_writes) {
    CHECK(torn_reads(2, 10'000, Guard::none) == 0);
    CHECK(torn_reads(3, 2'000, Guard::none) == 0);
}

#if !defined(__SANITIZE_THREAD__)  // the sanitizer ends the program at the first
TEST(without_a_guard_reads_are_torn) {
    for (const Guard guard : {Guard::begin_read, Guard::end_read})
        CHECK(torn_reads(2, 1'000, guard) > 0);
}
#endif

}  // namespace
}  // namespace dure
