// Ranks that share a core although another is free to them.
#include <sched.h>

#include "harness.h"

namespace dure {
namespace {

using namespace dure::testing;

cpu_set_t allowed_cores() {
    cpu_set_t set;
    CHECK(sched_getaffinity(0, sizeof set, &set) == 0);
    return set;
}

TEST(two_ranks_on_one_core_part_and_keep_what_they_are_allowed) {
    const cpu_set_t before = allowed_cores();
    if (CPU_COUNT(&before) < 2) return;  // there is no other core
    const auto statuses = on_processes(2, [&before](Group& g) {
        cpu_set_t one;
        CPU_ZERO(&one);
        for (int c = 0; c < CPU_SETSIZE && CPU_COUNT(&one) == 0; c++) {
            if (CPU_ISSET(c, &before)) CPU_SET(c, &one);
        }
        CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
        CHECK(g.run({Op::barrier}) == Status::ok);
        CHECK(sched_setaffinity(0, sizeof before, &before) == 0);
        const int64_t began = now_ns();
        for (float apart = 0; apart == 0;) {
            CHECK(now_ns() - began < 10'000'000'000);
            for (int k = 0; k < 500; k++) CHECK(g.run({Op::barrier}) == Status::ok);
            apart = g.shares_core(1 - g.rank()) ? 0.0f : 1.0f;
            const Block value{reinterpret_cast<std::byte*>(&apart), sizeof apart};
            CHECK(g.all_reduce(value, DType::f32, Reduction::min) == Status::ok);
        }
        const cpu_set_t after = allowed_cores();
        CHECK(CPU_EQUAL(&after, &before));
    });
    for (int status : statuses) CHECK(status == 0);
}

}  // namespace
}  // namespace dure
