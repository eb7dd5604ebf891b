// Threads of a rank that call without an order (core/threads.cpp): which calls fail.
#include "channel.h"
#include "harness.h"

namespace dure {
namespace {

using namespace dure::testing;

const std::string kFirst = "first", kSecond = "second";

Status sum(Group& g, std::vector<int32_t>& x, const std::string& thread, int channel = 0) {
    Call call{Op::all_reduce, DType::i32, Reduction::sum, -1, {}, {block_of(x)}};
    call.thread = &thread;
    return g.channel(channel).run(call);
}

// Rank 0 notes that the second thread was refused while its first one was in call number 1.
void refuse(Group& g, uint32_t number = 1) {
    if (g.rank() == 0) g.note_crossing(0, number, kSecond, "two threads");
}

TEST(names_of_threads_may_differ) {
    on_threads(2, [](Group& g) {
        std::vector<int32_t> x{1};
        CHECK(sum(g, x, g.rank() == 0 ? kFirst : kSecond) == Status::ok);
        CHECK(x[0] == 2);
    });
}

TEST(call_of_the_first_thread_ends_and_the_next_one_does_not) {
    for (int n : {1, 2, 3}) {
        on_threads(n, [n](Group& g) {
            refuse(g);
            std::vector<int32_t> x{1}, y{1};
            CHECK(sum(g, x, kFirst) == Status::ok);
            CHECK(x[0] == n);
            CHECK(sum(g, y, kFirst) == Status::crossed);
            CHECK(y[0] == 1);
            CHECK(g.failure().peer == 0);
            CHECK(g.failure().detail == "two threads");
        });
    }
}

TEST(call_of_the_other_channel_ends_the_group_no_earlier) {
    on_threads(2, [](Group& g) {
        refuse(g);
        std::vector<int32_t> x{1};
        CHECK(sum(g, x, kFirst, 1) == Status::ok);
        CHECK(sum(g, x, kFirst, 1) == Status::ok);
        CHECK(x[0] == 4);
    });
}

TEST(second_thread_elsewhere_gets_no_sum) {
    on_threads(2, [](Group& g) {
        std::vector<int32_t> x{1};
        CHECK(g.run({Op::barrier}) == Status::ok);
        refuse(g, 2);
        while (g.threads_seen() == 0) std::this_thread::yield();
        CHECK(sum(g, x, g.rank() == 0 ? kFirst : kSecond) == Status::crossed);
        CHECK(x[0] == 1);
    });
}

}  // namespace
}  // namespace dure
