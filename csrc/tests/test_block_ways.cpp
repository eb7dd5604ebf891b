// Collectives of one kind try both ways, and then take the quicker one.
#include "block_ways.h"
#include "channel.h"
#include "harness.h"

// The size of the last cache in this process; 0: that of the C library.
static long told_cache_bytes = 0;

extern "C" {
long __sysconf(int name) noexcept;  // the C library's

__attribute__((no_sanitize("address", "thread", "undefined"))) long sysconf(int name) noexcept {
    const bool told = name == _SC_LEVEL3_CACHE_SIZE && told_cache_bytes != 0;
    return told ? told_cache_bytes : __sysconf(name);
}
}

namespace dure {
namespace {

using namespace dure::testing;

// The first case, since a process asks once. Rank 1 is forked before rank 0 has asked.
TEST(ranks_that_are_told_of_different_caches_take_the_same_way) {
    const pid_t parent = getpid();
    single_copies = kLearnCopies;
    int ends[2];
    CHECK(pipe(ends) == 0);
    const auto gather = [](Group& g) {
        for (int i = 0; i < 40; i++) {
            std::vector<uint8_t> mine(100'000, static_cast<uint8_t>(2 * i + g.rank()));
            std::vector<uint8_t> first(mine.size()), second(mine.size());
            const Status status = g.run({Op::all_gather,
                                         DType::u8,
                                         Reduction::none,
                                         -1,
                                         {block_of(mine)},
                                         {block_of(first), block_of(second)}});
            CHECK(status == Status::ok);
            CHECK(first == std::vector<uint8_t>(mine.size(), static_cast<uint8_t>(2 * i)));
            CHECK(second == std::vector<uint8_t>(mine.size(), static_cast<uint8_t>(2 * i + 1)));
        }
        g.close();
    };
    const pid_t child = fork();
    if (child == 0) {
        told_cache_bytes = 64 * 1024;
        int file = -1;
        CHECK(read(ends[0], &file, sizeof file) == sizeof file);
        auto group = Group::attach(options_of(1, 2, 5), parent, file, kNonce);
        while (group->attached() < 2) group->wait_attached(1'000'000);
        group->ready();
        gather(*group);
        std::_Exit(0);
    }
    told_cache_bytes = 8 << 20;
    auto group = Group::create(options_of(0, 2, 5), kNonce);
    const int file = group->file();
    CHECK(write(ends[1], &file, sizeof file) == sizeof file);
    while (group->attached() < 2) group->wait_attached(1'000'000);
    group->ready();
    CHECK(group->copies().cache_bytes == 8 << 20);
    gather(*group);
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(kinds_are_operations_and_lengths_between_powers_of_two) {
    CHECK(block_kind(Op::broadcast, 8 * 1024 + 1) == 0);
    CHECK(block_kind(Op::broadcast, 16 * 1024) == 0);
    CHECK(block_kind(Op::broadcast, 16 * 1024 + 1) == 1);
    CHECK(block_kind(Op::broadcast, 16 << 20) == 10);
    CHECK(block_kind(Op::broadcast, (16 << 20) + 1) == 11);
    CHECK(block_kind(Op::broadcast, size_t{1} << 40) == 11);
    CHECK(block_kind(Op::all_gather, 16 * 1024) == 12);
    CHECK(block_kind(Op::gather, 16 * 1024) == 24);
    CHECK(block_kind(Op::scatter, 16 * 1024) == 36);
    CHECK(block_kind(Op::all_to_all, 16 * 1024) == 48);
    CHECK(block_kind(Op::all_to_all, size_t{1} << 40) == 59 && kBlockKinds == 60);
}

// Two ranks that are counted one after the other; `ns(call, rank)` is how long a call takes.
struct TwoRanks {
    static constexpr size_t kKind = 7;
    BlockTimes times[2] = {};
    BlockWays ways[2];

    template <typename Ns>
    bool call(int number, Ns ns) {
        const bool once = ways[0].once(kKind);
        CHECK(ways[1].once(kKind) == once);
        for (int rank = 0; rank < 2; rank++) {
            std::atomic<float>* lasted =
                ways[rank].count(kKind, rank, 2, [this](int r) -> BlockTimes& { return times[r]; });
            const bool timed = (number >= 12 && number < 16) || (number >= 20 && number < 24);
            CHECK((lasted != nullptr) == timed);
            if (lasted) lasted->store(ns(number, rank));
        }
        return once;
    }
};

TEST(eight_calls_are_staged_eight_try_each_way_and_the_others_take_the_quicker_one) {
    for (const bool once_wins : {true, false}) {
        TwoRanks two;
        const auto ns = [&](int number, int) { return (number >= 16) == once_wins ? 90.F : 100.F; };
        for (int i = 0; i < 16; i++) CHECK(!two.call(i, ns));
        for (int i = 16; i < 24; i++) CHECK(two.call(i, ns));
        CHECK(!two.call(24, ns));  // which reads the times
        for (int i = 25; i < 1024; i++) CHECK(two.call(i, ns) == once_wins);
        // The next period: the known way, until it has been tried again.
        const auto other = [&](int number, int) {
            return (number >= 16) == once_wins ? 100.F : 90.F;
        };
        for (int i = 0; i < 8; i++) CHECK(two.call(i, other) == once_wins);
        for (int i = 8; i < 24; i++) CHECK(two.call(i, other) == (i >= 16));
        two.call(24, other);
        for (int i = 25; i < 1024; i++) CHECK(two.call(i, other) != once_wins);
    }
}

// Staged: 100 on the slowest rank. Once: 90 in all tries except one; 90 on rank 0 only; 90 in two
// of four tries.
TEST(the_slowest_rank_counts_and_one_disturbance_does_not) {
    const auto chosen = [](auto once_ns) {
        TwoRanks two;
        const auto ns = [&](int number, int rank) {
            return number < 16 ? (rank == 1 ? 100.F : 1.F) : once_ns(number - 20, rank);
        };
        for (int i = 0; i < 25; i++) two.call(i, ns);
        return two.call(25, ns);
    };
    CHECK(chosen([](int number, int) { return number == 2 ? 5000.F : 90.F; }));
    CHECK(!chosen([](int, int rank) { return rank == 0 ? 90.F : 110.F; }));
    CHECK(!chosen([](int number, int) { return number < 2 ? 5000.F : 90.F; }));
}

TEST(kinds_are_counted_apart) {
    BlockTimes times[1] = {};
    BlockWays ways;
    for (int i = 0; i < 20; i++) {
        ways.count(3, 0, 1, [&](int r) -> BlockTimes& { return times[r]; });
    }
    CHECK(ways.once(3) && !ways.once(4));
}

// Collectives whose results are known by heart, over both ways and the change between them; short
// ones between, which are not counted.
TEST(ranks_change_ways_together) {
    single_copies = kLearnCopies;
    on_processes(3, [](Group& g) {
        constexpr size_t kCount = 5'000;
        for (int i = 0; i < 60; i++) {
            std::vector<int32_t> mine(kCount, 100 * i + g.rank());
            std::vector<std::vector<int32_t>> all(3, std::vector<int32_t>(kCount, -1));
            std::vector<Block> results;
            for (auto& list : all) results.push_back(block_of(list));
            CHECK(
                g.run(
                    {Op::all_gather, DType::i32, Reduction::none, -1, {block_of(mine)}, results}) ==
                Status::ok);
            for (int r = 0; r < 3; r++) {
                CHECK(all[static_cast<size_t>(r)] == std::vector<int32_t>(kCount, 100 * i + r));
            }
            CHECK(
                g.run({Op::broadcast, DType::i32, Reduction::none, i % 3, {}, {block_of(mine)}}) ==
                Status::ok);
            CHECK(mine == std::vector<int32_t>(kCount, 100 * i + i % 3));
            if (i % 7 == 0) CHECK(g.run({Op::barrier}) == Status::ok);
        }
        g.close();
    });
}

}  // namespace
}  // namespace dure
