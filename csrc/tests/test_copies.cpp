// Copies between processes: thresholds, permission, measuring, and ends in between.
#include <signal.h>

#include <algorithm>

#include "copying.h"
#include "harness.h"

namespace dure {
namespace {

using namespace dure::testing;

// ---- thresholds ---------------------------------------------------------------------------------

// For 32 and 512 KiB staged 10 and 100 us, copied once 19.5 and 49.5: once wins from where the
// lines cross.
CopyPlan measured_plan() {
    CopyPlan plan;
    plan.permitted = plan.measured = 1;
    plan.staged_message = plan.staged_exchange = {10, 100};
    plan.single_message = plan.single_exchange = {19.5F, 49.5F};
    return plan;
}

TEST(blocks_are_copied_once_from_where_the_times_cross) {
    CopyPlan plan = measured_plan();
    choose_copies(plan, kMeasureCopies, 2);
    // 0.8 of 19.5 and 0.5, 6.1 us more, at 32 KiB; 59.9 us less at 512 KiB: 6.1 parts of 66
    // between.
    const auto from = kShortTrial + (kLongTrial - kShortTrial) * 61 / 660;
    CHECK(plan.block_bytes > from - 64 && plan.block_bytes < from + 64);
    CHECK(plan.shared_bytes == plan.block_bytes);
    // With four ranks a shared block counts 1.5 times: 19.75 us more, 25.25 less.
    choose_copies(plan, kMeasureCopies, 4);
    CHECK(plan.block_bytes > from - 64 && plan.block_bytes < from + 64);
    const auto shared = kShortTrial + (kLongTrial - kShortTrial) * 1975 / 4500;
    CHECK(plan.shared_bytes > shared - 64 && plan.shared_bytes < shared + 64);
}

TEST(nothing_is_copied_once_that_is_slower_or_forbidden) {
    CopyPlan plan = measured_plan();
    plan.single_exchange = {19.5F, 125};  // 0.8 of it, and 0.5: half a microsecond slower
    choose_copies(plan, kMeasureCopies, 2);
    CHECK(plan.block_bytes == kNeverCopiedOnce && plan.message_bytes != kNeverCopiedOnce);
    choose_copies(plan, kMeasureCopies, 3);
    CHECK(plan.shared_bytes == kNeverCopiedOnce);
    choose_copies(plan, kNoSingleCopies, 2);
    CHECK(plan.message_bytes == kNeverCopiedOnce);
    choose_copies(plan, 1000, 2);
    CHECK(plan.message_bytes == 1000 && plan.block_bytes == 1000 && plan.shared_bytes == 1000);
    plan.permitted = 0;
    choose_copies(plan, 1000, 2);
    CHECK(plan.message_bytes == kNeverCopiedOnce && plan.block_bytes == kNeverCopiedOnce);
}

TEST(without_a_measurement_what_exceeds_128_kib_is_copied_once) {
    CopyPlan plan;
    plan.permitted = 1;
    for (int ranks : {2, 4}) {
        choose_copies(plan, kMeasureCopies, ranks);
        CHECK(plan.message_bytes == 131'072 && plan.shared_bytes == 131'072);
        CHECK(plan.block_bytes == 131'072);
    }
    plan.permitted = 0;
    choose_copies(plan, kMeasureCopies, 2);
    CHECK(plan.message_bytes == kNeverCopiedOnce && plan.block_bytes == kNeverCopiedOnce);
}

TEST(two_processes_measure_and_all_ranks_learn_it) {
    single_copies = kMeasureCopies;
    on_processes(3, [](Group& g) {
        const CopyPlan& plan = g.copies();
        CHECK(plan.permitted && plan.host == kNonce);
        // Where the two were kept from their cores nothing counts as measured.
        CHECK(plan.measured == (plan.line_us > 0));
        CHECK(plan.line_us < 2);
        // All ranks have the same plan.
        double mine[2] = {static_cast<double>(plan.message_bytes), plan.line_us};
        double least[2] = {mine[0], mine[1]}, most[2] = {mine[0], mine[1]};
        auto block = [](double* x) { return Block{reinterpret_cast<std::byte*>(x), 16}; };
        CHECK(g.all_reduce(block(least), DType::f64, Reduction::min) == Status::ok);
        CHECK(g.all_reduce(block(most), DType::f64, Reduction::max) == Status::ok);
        CHECK(least[0] == most[0] && least[1] == most[1]);
        g.close();
    });
}

// ---- permission ---------------------------------------------------------------------------------

TEST(the_nearest_common_ancestor_is_found) {
    const pid_t me = getpid();
    int ends[2];
    CHECK(pipe(ends) == 0);
    const pid_t child = fork();
    if (child == 0) {
        const pid_t grandchild = fork();
        if (grandchild == 0) {
            pause();
            _Exit(0);
        }
        CHECK(write(ends[1], &grandchild, sizeof grandchild) == sizeof grandchild);
        pause();
    }
    pid_t grandchild = 0;
    CHECK(read(ends[0], &grandchild, sizeof grandchild) == sizeof grandchild);
    CHECK(common_ancestor({child, grandchild}) == child);
    CHECK(common_ancestor({grandchild, me}) == me);
    CHECK(common_ancestor({grandchild}) == grandchild);
    CHECK(common_ancestor({child, 1}) == 0);  // init is nobody's
    CHECK(common_ancestor({}) == 0);
    kill(grandchild, SIGKILL);
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    close(ends[0]);
    close(ends[1]);
}

// Can fail only where Yama restricts ptrace to descendants (scripts/yama-test).
TEST(a_peer_stays_admitted_when_nearer_ones_come) {
    static int word = 1;
    int ends[2];
    CHECK(pipe(ends) == 0);
    const pid_t reader = fork();
    if (reader == 0) {
        pid_t owner = 0;
        CHECK(read(ends[0], &owner, sizeof owner) == sizeof owner);
        int got = 0;
        const bool may = read_from({owner, reinterpret_cast<uint64_t>(&word)}, &got, sizeof got);
        kill(owner, SIGKILL);
        CHECK(may && got == 2);
        std::_Exit(0);
    }
    const pid_t launcher = fork();
    if (launcher == 0) {
        const pid_t owner = fork();
        if (owner == 0) {
            const pid_t me = getpid();
            word = 2;
            admit_peers({me, reader});
            admit_peers({me, getppid()});
            CHECK(write(ends[1], &me, sizeof me) == sizeof me);
            pause();
        }
        waitpid(owner, nullptr, 0);
        std::_Exit(0);
    }
    int status = 0;
    waitpid(reader, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    waitpid(launcher, nullptr, 0);
    close(ends[0]);
    close(ends[1]);
}

// Element by element the thread sanitizer would take most of the time.
__attribute__((no_sanitize("thread"))) void set_all(int32_t* to, size_t count, int32_t value) {
    for (size_t i = 0; i < count; i++) to[i] = value;
}

std::vector<int32_t> all_of(size_t count, int32_t value) {
    std::vector<int32_t> made(count);
    set_all(made.data(), count, value);
    return made;
}

// All collectives that move blocks of `count` numbers, with right results.
void move_everything(Group& g, size_t count) {
    const auto n = static_cast<size_t>(g.size()), me = static_cast<size_t>(g.rank());
    const auto value = [](size_t from, size_t to) { return static_cast<int32_t>(100 * from + to); };
    std::vector<std::vector<int32_t>> in(n), out(n);
    auto blocks = [](std::vector<std::vector<int32_t>>& lists) {
        std::vector<Block> all;
        for (auto& list : lists) all.push_back(block_of(list));
        return all;
    };
    auto fill = [&](bool same) {
        for (size_t r = 0; r < n; r++) {
            in[r] = all_of(count, value(me, same ? 0 : r));
            out[r] = all_of(count, -1);
        }
    };
    const std::vector<int32_t> none;
    const int root = g.size() - 1;
    fill(true);
    CHECK(
        g.run({Op::all_gather, DType::i32, Reduction::none, -1, {block_of(in[0])}, blocks(out)}) ==
        Status::ok);
    for (size_t r = 0; r < n; r++) CHECK(out[r] == all_of(count, value(r, 0)));
    fill(false);
    CHECK(g.run({Op::all_to_all, DType::i32, Reduction::none, -1, blocks(in), blocks(out)}) ==
          Status::ok);
    for (size_t r = 0; r < n; r++) CHECK(out[r] == all_of(count, value(r, me)));
    fill(true);
    CHECK(g.run({Op::broadcast, DType::i32, Reduction::none, root, {}, {block_of(in[0])}}) ==
          Status::ok);
    CHECK(in[0] == all_of(count, value(n - 1, 0)));
    fill(false);
    Call scatter{Op::scatter, DType::i32, Reduction::none, root, {}, {block_of(out[0])}};
    if (g.rank() == root) scatter.inputs = blocks(in);
    CHECK(g.run(scatter) == Status::ok);
    CHECK(out[0] == all_of(count, value(n - 1, me)));
    fill(true);
    Call gather{Op::gather, DType::i32, Reduction::none, root, {block_of(in[0])}, {}};
    if (g.rank() == root) gather.outputs = blocks(out);
    CHECK(g.run(gather) == Status::ok);
    for (size_t r = 0; r < n && g.rank() == root; r++) {
        CHECK(out[r] == all_of(count, value(r, 0)));
    }
}

const std::vector<size_t> kCounts = {0, 1, 8, 9, 1023, 1024, 1025, 100'003, 400'000};

TEST(processes_read_each_others_blocks) {
    single_copies = 4096;
    for (int n : {2, 3}) {
        on_processes(n, [](Group& g) {
            CHECK(g.copies().block_bytes == 4096);
            for (size_t count : kCounts) move_everything(g, count);
            g.close();
        });
    }
}

TEST(where_the_kernel_refuses_from_the_beginning_everything_is_staged) {
    in_child([] {
        single_copies = 4096;
        on_processes(
            2,
            [](Group& g) {
                CHECK(!g.copies().permitted && g.copies().block_bytes == kNeverCopiedOnce);
                for (size_t count : kCounts) move_everything(g, count);
                g.close();
            },
            20,
            [](Group& g) {
                if (g.rank() == 1) forbid_single_copies();
            });
    });
}

TEST(where_the_kernel_refuses_later_all_begin_anew_through_staging) {
    in_child([] {
        single_copies = 4096;
        on_processes(3, [](Group& g) {
            CHECK(g.copies().permitted);
            if (g.rank() == 1) forbid_single_copies();
            for (size_t count : kCounts) move_everything(g, count);
            g.close();
        });
    });
}

// Rank 1 keeps a block for itself that is too long to be copied once; rank 0 learns that only when
// it has told where its own block lies.
TEST(a_long_block_of_one_rank_has_all_blocks_staged) {
    single_copies = kMeasureCopies;
    on_threads(2, [](Group& g) {
        const CopyPlan& plan = g.copies();
        CHECK(plan.permitted && plan.within_cache);
        // 40 MB, and what is copied once as this machine was measured; where nothing is, both
        // staged.
        constexpr size_t kLong = 10'000'000;
        const size_t short_count = std::min<size_t>(plan.block_bytes / 4 + 1, kLong / 10);
        const size_t own = g.rank() == 0 ? short_count : kLong;
        const auto me = static_cast<size_t>(g.rank()), peer = 1 - me;
        std::vector<std::vector<int32_t>> in(2), out(2);
        in[me] = all_of(own, 10 * g.rank());
        in[peer] = all_of(short_count, 10 * g.rank() + 1);
        out[me] = all_of(own, -1);
        out[peer] = all_of(short_count, -1);
        CHECK(g.run({Op::all_to_all,
                     DType::i32,
                     Reduction::none,
                     -1,
                     {block_of(in[0]), block_of(in[1])},
                     {block_of(out[0]), block_of(out[1])}}) == Status::ok);
        CHECK(out[me] == all_of(own, 10 * g.rank()));
        CHECK(out[peer] == all_of(short_count, 10 * static_cast<int>(peer) + 1));
        g.close();
    });
}

// Blocks that are copied once as long as a cache holds them, and streamed from there on.
TEST(blocks_of_all_lengths_arrive_whichever_way_they_take) {
    single_copies = kMeasureCopies;
    for (int n : {2, 3}) {
        on_processes(n, [](Group& g) {
            for (size_t count : {5'000, 500'000, 5'000'003}) move_everything(g, count);
            g.close();
        });
    }
}

// Around the blocks that are copied page by page, from and to odd addresses; nothing beside is
// touched.
TEST(long_copies_are_whole_and_touch_nothing_else) {
    constexpr size_t kBlock = 4 * kPage, kRoom = 3 * kBlock;
    std::vector<uint8_t> from(kRoom), to;
    for (size_t i = 0; i < kRoom; i++) from[i] = static_cast<uint8_t>(i * 7 + i / 256);
    for (size_t bytes : {size_t{0}, size_t{1}, size_t{63}, size_t{200}, kBlock - 1, kBlock,
                         kBlock + 64, kBlock + 65, 2 * kBlock + 127}) {
        for (size_t skew : {0, 1, 64, 100}) {
            QuickerWay large, fetched;  // whose first two copies go both ways
            for (int copy = 0; copy < 4; copy++) {
                to.assign(kRoom, 255);
                auto* out = reinterpret_cast<std::byte*>(to.data()) + skew;
                auto* in = reinterpret_cast<std::byte*>(from.data()) + 3;
                if (copy % 2 == 0) {
                    large_copy(large, out, in, bytes);
                } else {
                    fetch_copy(fetched, out, in, bytes);
                }
                std::vector<uint8_t> expected(kRoom, 255);
                std::copy_n(from.begin() + 3, bytes, expected.begin() + skew);
                CHECK(to == expected);
            }
        }
    }
}

// The quicker way is the one that is taken, and when the other one becomes quicker, that.
TEST(of_two_ways_to_copy_the_quicker_one_is_taken) {
    const auto slow = [] { std::this_thread::sleep_for(std::chrono::milliseconds(1)); };
    QuickerWay way;
    int plain = 0, other = 0;
    for (int copy = 0; copy < 1024; copy++) {
        way.copy(
            kPage * 4, [&] { plain++; },
            [&] {
                other++;
                slow();
            });
    }
    CHECK(plain == 1020 && other == 4);
    for (int copy = 0; copy < 1024; copy++) {
        way.copy(
            kPage * 4,
            [&] {
                plain++;
                slow();
            },
            [&] { other++; });
    }
    CHECK(plain == 1024 && other == 1024);
    way.copy(100, [&] { plain++; }, [&] { other++; });
    CHECK(other == 1025);  // a short copy is no try, and goes the way that is known
}

// As of a thread that is in its try while others copy.
TEST(a_first_try_that_ends_after_the_last_one_does_not_count) {
    QuickerWay way;
    int plain = 0, other = 0;
    const auto slow = [] { std::this_thread::sleep_for(std::chrono::milliseconds(1)); };
    const auto copy = [&] {
        way.copy(
            kPage * 4, [&] { plain++; },
            [&] {
                other++;
                slow();
            });
    };
    copy();
    way.copy(
        kPage * 4, [&] { plain++; },
        [&] {
            slow();
            for (int number = 2; number < 8; number++) copy();
        });
    for (int number = 8; number < 1024; number++) copy();
    CHECK(plain == 1020 && other == 3);
}

// ---- ends in between ----------------------------------------------------------------------------

constexpr size_t kLarge = size_t{128} << 20;

// Until what is being copied has begun to come; meant to look while somebody writes.
__attribute__((no_sanitize_thread)) void await_byte(const volatile uint8_t* byte, uint8_t value) {
    while (*byte != value) continue;
}

// Rank 1 is killed when rank 0 has got the first of what rank 1 sends.
void lose_a_rank(int n, Op op) {
    single_copies = 4096;
    on_processes(
        n,
        [op](Group& g) {
            std::vector<uint8_t> mine(kLarge, static_cast<uint8_t>(g.rank() + 1));
            std::vector<std::vector<uint8_t>> all(static_cast<size_t>(g.size()));
            Call call{op, DType::u8, Reduction::none, 1, {}, {}};
            const uint8_t* first = mine.data();
            if (op == Op::broadcast) {
                call.outputs = {block_of(mine)};
            } else {
                call.root = -1;
                call.inputs = {block_of(mine)};
                for (auto& list : all) {
                    list.resize(kLarge);
                    call.outputs.push_back(block_of(list));
                }
                first = all[1].data();
            }
            std::thread watches;
            if (g.rank() == 0) {
                watches = std::thread([first, pid = g.pid_of(1)] {
                    await_byte(first, 2);
                    kill(pid, SIGKILL);
                });
            }
            const Status s = g.run(call);
            if (watches.joinable()) watches.join();
            // Whoever had all it wanted before may end well; the next call tells it.
            CHECK(s == Status::peer_lost || s == Status::ok);
            CHECK(s == Status::peer_lost || g.run({Op::barrier}) == Status::peer_lost);
            CHECK(g.failure().peer == 1);
            g.close();
        },
        10);
}

TEST(a_root_that_dies_amid_a_broadcast_is_lost) { lose_a_rank(2, Op::broadcast); }
TEST(a_rank_that_dies_amid_an_all_gather_is_lost) { lose_a_rank(3, Op::all_gather); }

}  // namespace
}  // namespace dure
