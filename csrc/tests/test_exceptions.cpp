// Exceptions in the engine's own threads, and in calls: here of memory that cannot be had.
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <string_view>

#include "channel.h"
#include "harness.h"
#include "mailbox.h"

namespace {

// How many allocations fail, of threads of that name.
std::atomic<int> failures{0};
const char* failing_thread = "";

void* allocate(size_t bytes) {
    if (failures.load() > 0) {
        char name[16] = {};
        pthread_getname_np(pthread_self(), name, sizeof name);
        if (std::string_view(name) == failing_thread && failures.fetch_sub(1) > 0)
            throw std::bad_alloc();
    }
    void* made = std::malloc(bytes ? bytes : 1);
    if (!made) throw std::bad_alloc();
    return made;
}

}  // namespace

void* operator new(size_t bytes) { return allocate(bytes); }
void* operator new[](size_t bytes) { return allocate(bytes); }
void operator delete(void* data) noexcept { std::free(data); }
void operator delete(void* data, size_t) noexcept { std::free(data); }
void operator delete[](void* data) noexcept { std::free(data); }
void operator delete[](void* data, size_t) noexcept { std::free(data); }

namespace dure {
namespace {

using namespace dure::testing;

void fail_allocations(int count, const char* thread) {
    failing_thread = thread;
    failures = count;
}

// Rank 0 does not come, so that the other rank's progress thread words what it knows of it.
TEST(an_exception_in_the_progress_thread_breaks_the_group_for_all_ranks) {
    std::atomic<bool> ended{false};
    on_threads(
        2,
        [&](Group& g) {
            std::vector<float> x(4);
            Call call{Op::all_reduce, DType::f32, Reduction::sum};
            call.outputs = {block_of(x)};
            if (g.rank() == 0) {
                while (!ended) std::this_thread::yield();
                CHECK(g.run(call) == Status::outside);
                CHECK(g.failure().detail == "rank 1 has no memory left");
                CHECK(g.failure().reporter == 1);
                return;
            }
            const auto request = g.channel(0).start(call);
            fail_allocations(1, "dure-progress");
            while (!request->wait(1'000'000'000)) {
            }
            CHECK(failures == 0);
            CHECK(request->outcome().status == Status::outside);
            CHECK(request->outcome().detail == "rank 1 has no memory left");
            ended = true;
        },
        0.2);
}

TEST(a_progress_thread_without_any_memory_ends_its_operations) {
    std::atomic<bool> ended{false};
    on_threads(
        2,
        [&](Group& g) {
            if (g.rank() == 0) {
                while (!ended) std::this_thread::yield();
                return;
            }
            const auto request = g.channel(0).start({Op::barrier});
            fail_allocations(1'000'000, "dure-progress");
            while (!request->wait(1'000'000'000)) {
            }
            failures = 0;
            CHECK(request->outcome().status != Status::ok);
            ended = true;
        },
        0.2);
}

TEST(an_exception_in_a_call_breaks_the_group_for_all_ranks) {
    on_threads(2, [](Group& g) {
        if (g.rank() == 0) {
            pthread_setname_np(pthread_self(), "rank 0");
            fail_allocations(1, "rank 0");
        }
        Status status = Status::ok;
        CHECK(g.host_shared_empty(100, status) == nullptr);
        CHECK(status == Status::outside);
        CHECK(g.failure().detail == "rank 0 has no memory left");
    });
}

// The mailbox's thread makes a list of those that wait for a message, and for how long.
TEST(an_exception_in_the_mailbox_breaks_the_group_for_all_ranks) {
    std::atomic<bool> ended{false};
    on_threads(2, [&](Group& g) {
        Mailbox box(g);
        std::vector<float> x(4);
        if (g.rank() == 0) {
            const auto request = box.start_receive(block_of(x), DType::f32, 1, 3);
            fail_allocations(1, "dure-mailbox");
            while (!request->wait(1'000'000'000)) {
            }
            CHECK(request->outcome().status == Status::outside);
            CHECK(request->outcome().detail == "rank 0 has no memory left");
            ended = true;
        } else {
            while (!ended) std::this_thread::yield();
            int source = -1;
            CHECK(box.receive(block_of(x), DType::f32, 0, 5, &source).status == Status::outside);
        }
        g.close();
        box.stop();
    });
}

}  // namespace
}  // namespace dure
