// Copies between processes: what is asked for, permission, and ends in between.
#include <signal.h>

#include <algorithm>

#include "copying.h"
#include "harness.h"
#include "single_copy.h"

namespace dure {
namespace {

using namespace dure::testing;

// ---- what a group agrees on ---------------------------------------------------------------------

TEST(a_group_copies_as_it_was_asked_to) {
    CopyPlan plan;
    plan.permitted = 1;
    choose_copies(plan, kLearnCopies);
    CHECK(plan.learns && plan.once_bytes == kNeverCopiedOnce);
    choose_copies(plan, 1000);
    CHECK(!plan.learns && plan.once_bytes == 1000);
    choose_copies(plan, kNoSingleCopies);
    CHECK(!plan.learns && plan.once_bytes == kNeverCopiedOnce);
    plan.permitted = 0;
    choose_copies(plan, 1000);
    CHECK(plan.once_bytes == kNeverCopiedOnce);
}

TEST(all_ranks_know_that_copies_are_permitted) {
    single_copies = kLearnCopies;
    on_processes(3, [](Group& g) {
        CHECK(g.copies().permitted && g.copies().learns && g.copies().host == kNonce);
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
            CHECK(g.copies().once_bytes == 4096);
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
                CHECK(!g.copies().permitted && g.copies().once_bytes == kNeverCopiedOnce);
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

// Rank 1 keeps a long block for itself; rank 0 learns that only after it has put its own, short one
// into staging or told where it lies. Calls with short blocks alone come between, so that the ranks
// expect every combination of ways.
TEST(ranks_that_expect_different_ways_agree_on_one) {
    single_copies = kLearnCopies;
    on_processes(2, [](Group& g) {
        constexpr size_t kShort = 3'000, kLong = 30'000;
        const auto me = static_cast<size_t>(g.rank()), peer = 1 - me;
        for (int i = 0; i < 80; i++) {
            const size_t own = g.rank() == 1 && i % 3 != 0 ? kLong : kShort;
            std::vector<std::vector<int32_t>> in(2), out(2);
            in[me] = all_of(own, 10 * g.rank() + i);
            in[peer] = all_of(kShort, 10 * g.rank() + i + 1);
            out[me] = all_of(own, -1);
            out[peer] = all_of(kShort, -1);
            CHECK(g.run({Op::all_to_all,
                         DType::i32,
                         Reduction::none,
                         -1,
                         {block_of(in[0]), block_of(in[1])},
                         {block_of(out[0]), block_of(out[1])}}) == Status::ok);
            CHECK(out[me] == all_of(own, 10 * g.rank() + i));
            CHECK(out[peer] == all_of(kShort, 10 * static_cast<int>(peer) + i + 1));
        }
        g.close();
    });
}

// Blocks whose ways are tried, then taken, and those that exceed the cache.
TEST(blocks_of_all_lengths_arrive_whichever_way_they_take) {
    single_copies = kLearnCopies;
    for (int n : {2, 3}) {
        on_processes(n, [](Group& g) {
            for (int i = 0; i < 26; i++) move_everything(g, 5'000);
            for (size_t count : {500'000, 5'000'003}) move_everything(g, count);
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

// Rank 1 ends as soon as it is through, mostly before rank 0 has looked whether all are there.
TEST(a_rank_that_ends_after_a_collective_does_not_break_it) {
    single_copies = 4096;
    for (int i = 0; i < 40; i++) {
        on_processes(2, [](Group& g) {
            std::vector<uint8_t> mine(100'000, 1), first(100'000), second(100'000);
            CHECK(g.run({Op::all_gather,
                         DType::u8,
                         Reduction::none,
                         -1,
                         {block_of(mine)},
                         {block_of(first), block_of(second)}}) == Status::ok);
            if (g.rank() == 1) _exit(0);
            g.close();
        });
    }
}

TEST(a_root_that_dies_amid_a_broadcast_is_lost) { lose_a_rank(2, Op::broadcast); }
TEST(a_rank_that_dies_amid_an_all_gather_is_lost) { lose_a_rank(3, Op::all_gather); }

}  // namespace
}  // namespace dure
