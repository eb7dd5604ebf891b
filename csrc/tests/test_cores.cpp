// Ranks that share a core although another is free to them.
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

#include "harness.h"

namespace {

// While it is true, somebody else restricts this thread to one core just after the thread has
// restricted itself, and then leaves it alone.
std::atomic<bool> meddles{false};
std::atomic<int> num_changes{0};  // of this process's affinity, by the engine

long set_affinity(pid_t thread, size_t bytes, const cpu_set_t* set) {
    return syscall(SYS_sched_setaffinity, thread, bytes, set);
}

}  // namespace

// In place of the C library's, so that something can happen between two calls of the engine.
extern "C" int sched_setaffinity(pid_t thread, size_t bytes, const cpu_set_t* set) noexcept {
    const long result = set_affinity(thread, bytes, set);
    num_changes++;
    if (result == 0 && CPU_COUNT(set) == 1 && meddles.exchange(false)) {
        cpu_set_t other;
        CPU_ZERO(&other);
        const auto here = static_cast<size_t>(sched_getcpu());
        for (size_t c = 0; c < CPU_SETSIZE && CPU_COUNT(&other) == 0; c++) {
            if (c != here) CPU_SET(c, &other);
        }
        return static_cast<int>(set_affinity(thread, sizeof other, &other));
    }
    return static_cast<int>(result);
}

namespace dure {
namespace {

using namespace dure::testing;

cpu_set_t allowed_cores() {
    cpu_set_t set;
    CHECK(sched_getaffinity(0, sizeof set, &set) == 0);
    return set;
}

// The first `n` cores of `set`; fewer if it has fewer.
cpu_set_t first_of(const cpu_set_t& set, int n) {
    cpu_set_t first;
    CPU_ZERO(&first);
    for (size_t c = 0; c < CPU_SETSIZE && CPU_COUNT(&first) < n; c++) {
        if (CPU_ISSET(c, &set)) CPU_SET(c, &first);
    }
    return first;
}

// Bring both ranks to one core again and again, and let them wait for each other there, until
// `done` is true on one.
template <typename F>
void share_a_core_until(Group& g, const cpu_set_t& allowed, F done) {
    const cpu_set_t one = first_of(allowed, 1);
    const int64_t began = now_ns();
    for (float ends = 0; ends == 0;) {
        CHECK(now_ns() - began < 10'000'000'000);
        CHECK(set_affinity(0, sizeof one, &one) == 0);
        CHECK(g.run({Op::barrier}) == Status::ok);
        CHECK(set_affinity(0, sizeof allowed, &allowed) == 0);
        for (int k = 0; k < 500; k++) CHECK(g.run({Op::barrier}) == Status::ok);
        ends = done() ? 1.0f : 0.0f;
        const Block value{reinterpret_cast<std::byte*>(&ends), sizeof ends};
        CHECK(g.all_reduce(value, DType::f32, Reduction::max) == Status::ok);
    }
}

TEST(ranks_that_were_not_asked_to_never_change_their_affinity) {
    const cpu_set_t before = allowed_cores(), one = first_of(before, 1);
    migrates = false;
    const auto statuses = on_processes(2, [&one](Group& g) {
        CHECK(set_affinity(0, sizeof one, &one) == 0);  // so that each yield meets the other rank
        for (int k = 0; k < 5'000; k++) CHECK(g.run({Op::barrier}) == Status::ok);
        CHECK(num_changes == 0);
    });
    CHECK(set_affinity(0, sizeof before, &before) == 0);
    for (int status : statuses) CHECK(status == 0);
}

TEST(two_ranks_on_one_core_part_and_keep_what_they_are_allowed) {
    const cpu_set_t before = allowed_cores();
    if (CPU_COUNT(&before) < 2) SKIP("there is no other core");
    migrates = true;
    const auto statuses = on_processes(2, [&before](Group& g) {
        share_a_core_until(g, before, [&] { return !g.shares_core(1 - g.rank()); });
        const cpu_set_t after = allowed_cores();
        CHECK(CPU_EQUAL(&after, &before));
    });
    for (int status : statuses) CHECK(status == 0);
}

TEST(a_rank_that_moves_leaves_what_somebody_else_allows_it_meanwhile) {
    // Of two cores, so that a rank that moves restricts itself to one.
    const cpu_set_t all = allowed_cores(), before = first_of(all, 2);
    if (CPU_COUNT(&before) < 2) SKIP("there is no other core");
    migrates = true;
    CHECK(set_affinity(0, sizeof before, &before) == 0);
    const auto statuses = on_processes(2, [&before](Group& g) {
        meddles = true;
        share_a_core_until(g, before, [&] { return !meddles; });
        const cpu_set_t after = allowed_cores();
        CHECK(CPU_EQUAL(&after, &before) == meddles.load());
        CHECK(meddles || CPU_COUNT(&after) == 1);
    });
    CHECK(set_affinity(0, sizeof all, &all) == 0);
    for (int status : statuses) CHECK(status == 0);
}

}  // namespace
}  // namespace dure
