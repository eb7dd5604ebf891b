// Two channels: the order of calls on each, asynchronous ones among them, and the end of a group
// with work in its queue.
#include <utility>

#include "backoff.h"
#include "call_queue.h"
#include "channel.h"
#include "harness.h"

namespace dure {
namespace {

using namespace dure::testing;

Call all_reduce_of(std::vector<int32_t>& x) {
    return {Op::all_reduce, DType::i32, Reduction::sum, -1, {}, {block_of(x)}};
}

TEST(the_longer_a_rank_has_waited_the_less_often_it_looks) {
    CHECK(slice_ns(0) == 4'000'000);
    CHECK(slice_ns(640'000'000) == 10'000'000);
    CHECK(slice_ns(60'000'000'000) == 20'000'000);
}

TEST(operations_run_in_the_order_of_their_start) {
    on_threads(3, [](Group& g) {
        Channel& channel = g.channel(1);
        std::vector<std::vector<int32_t>> tensors;
        std::vector<std::shared_ptr<Request>> requests;
        for (int k = 0; k < 100; k++) {
            tensors.emplace_back(static_cast<size_t>(1 + k * 100), k + g.rank());
        }
        for (auto& x : tensors) requests.push_back(channel.start(all_reduce_of(x)));
        for (int k = 0; k < 100; k++) {
            auto at = static_cast<size_t>(k);
            CHECK(requests[at]->wait(20'000'000'000));
            CHECK(requests[at]->outcome().status == Status::ok);
            CHECK(tensors[at].front() == 3 * k + 3 && tensors[at].back() == 3 * k + 3);
        }
    });
}

TEST(closing_aborts_what_is_queued) {
    on_threads(2, [](Group& g) {
        Channel& channel = g.channel(1);
        std::vector<int32_t> x(10), y(10);
        std::shared_ptr<Request> first, second;
        if (g.rank() == 0) {
            first = channel.start(all_reduce_of(x));
            second = channel.start(all_reduce_of(y));
        }
        g.close();
        if (g.rank() == 0) {
            CHECK(first->done() && first->outcome().status != Status::ok);
            CHECK(second->done() && second->outcome().status != Status::ok);
            CHECK(channel.start(all_reduce_of(x))->outcome().status == Status::aborted);
        }
    });
}

// Each channel has threads of its own on each rank, which go through the same calls at their own
// pace: were slots or staging shared, sums of one would be found in the other.
TEST(channels_do_not_wait_for_each_other_nor_mix) {
    static constexpr size_t kCounts[] = {1, 8, 9, 4097, kStageBytes / 4 + 1, 300007};
    for (int n : {1, 2, 3}) {
        on_threads(n, [n](Group& g) {
            std::vector<std::thread> threads;
            for (int c = 0; c < kChannels; c++) {
                threads.emplace_back([&, c] {
                    for (int k = 0; k < 60; k++) {
                        const int base = 1000 * (c + 1) + k;
                        std::vector<int32_t> x(kCounts[static_cast<size_t>(k) % 6],
                                               base + g.rank());
                        CHECK(g.channel(c).run(all_reduce_of(x)) == Status::ok);
                        const int sum = n * base + n * (n - 1) / 2;
                        for (int32_t value : x) CHECK(value == sum);
                    }
                });
            }
            for (std::thread& t : threads) t.join();
        });
    }
}

TEST(channels_match_whichever_is_called_first) {
    on_threads(2, [](Group& g) {
        std::vector<int32_t> x(1000, 1), y(1000, 10);
        auto first = g.channel(g.rank()).start(all_reduce_of(g.rank() == 0 ? x : y));
        CHECK(g.channel(1 - g.rank()).run(all_reduce_of(g.rank() == 0 ? y : x)) == Status::ok);
        CHECK(first->wait(20'000'000'000));
        CHECK(x.back() == 2 && y.back() == 20);
    });
}

// A call's place is taken with its number, not when its thread gets to run.
TEST(a_turn_that_was_taken_first_goes_first) {
    on_threads(2, [](Group& g) {
        for (int round = 0; round < 50; round++) {
            std::vector<int32_t> x(10, 1), y(20, 10);
            Channel& channel = g.channel(0);
            Channel::Turn turn(channel);
            auto later = channel.start(all_reduce_of(y));  // on the other rank as well
            CHECK(channel.run(all_reduce_of(x), std::move(turn)) == Status::ok);
            CHECK(later->wait(20'000'000'000) && later->outcome().status == Status::ok);
            CHECK(x[0] == 2 && y[0] == 20);
        }
    });
}

// A thread may be held up between taking its number and handing over its call.
TEST(calls_queue_in_the_order_of_their_numbers) {
    on_threads(2, [](Group& g) {
        Channel& channel = g.channel(1);
        std::vector<int32_t> x(10, 1), y(20, 10), z(30, 100);
        Channel::Turn first(channel), second(channel), third(channel);
        auto last = channel.start(all_reduce_of(z), std::move(third), false);
        auto middle = channel.start(all_reduce_of(y), std::move(second), true);
        auto begin = channel.start(all_reduce_of(x), std::move(first), false);
        CHECK(last->wait(20'000'000'000) && begin->done() && middle->done());
        CHECK(x[0] == 2 && y[0] == 20 && z[0] == 200);
    });
}

TEST(calls_of_several_threads_run_one_at_a_time_in_the_order_of_their_numbers) {
    on_threads(2, [](Group& g) {
        constexpr int kThreads = 4, kCalls = 200;
        Channel& channel = g.channel(1);
        std::mutex numbering;
        int next = 0;
        std::vector<std::thread> threads;
        for (int t = 0; t < kThreads; t++) {
            threads.emplace_back([&] {
                for (;;) {
                    std::unique_lock hold(numbering);
                    if (next == kCalls) return;
                    const int k = next++;
                    Channel::Turn turn(channel);
                    hold.unlock();
                    std::vector<int32_t> x(static_cast<size_t>(k % 7 + 1), k);
                    if (k % 3 == 0) {
                        auto request = channel.start(all_reduce_of(x), std::move(turn), k % 2 == 0);
                        CHECK(request->wait(20'000'000'000));
                        CHECK(request->outcome().status == Status::ok);
                    } else {
                        CHECK(channel.run(all_reduce_of(x), std::move(turn)) == Status::ok);
                    }
                    CHECK(x.front() == 2 * k && x.back() == 2 * k);
                }
            });
        }
        for (std::thread& t : threads) t.join();
    });
}

// Who waits runs what has not begun, up to what it waits for and in the order of the calls.
TEST(whoever_waits_runs_the_calls_before_too) {
    on_threads(2, [](Group& g) {
        Channel& channel = g.channel(0);
        for (int round = 0; round < 200; round++) {
            std::vector<std::vector<int32_t>> tensors;
            std::vector<std::shared_ptr<Request>> requests;
            for (int k = 0; k < 5; k++) tensors.emplace_back(static_cast<size_t>(k + 1), k);
            for (auto& x : tensors) requests.push_back(channel.start(all_reduce_of(x), true));
            const size_t last = static_cast<size_t>(round % 5);
            CHECK(requests[last]->complete());
            for (size_t k = 0; k <= last; k++) {
                CHECK(requests[k]->done() && requests[k]->outcome().status == Status::ok);
                CHECK(tensors[k].back() == 2 * static_cast<int>(k));
            }
            CHECK(requests[4]->complete() && tensors[4].front() == 8);
        }
    });
}

// Nobody waits: the progress thread finds it.
TEST(a_brief_call_that_nobody_waits_for_is_run) {
    on_threads(2, [](Group& g) {
        for (int round = 0; round < 20; round++) {
            std::vector<int32_t> x(3, 7);
            auto request = g.channel(1).start(all_reduce_of(x), true);
            while (!request->done()) usleep(100);
            CHECK(request->outcome().status == Status::ok && x[2] == 14);
        }
    });
}

// Who waits aside leaves the call to the progress thread, which then may not spin.
TEST(waiting_aside_neither_runs_the_call_nor_tells_that_a_core_is_free) {
    on_threads(2, [](Group& g) {
        Channel& channel = g.channel(0);
        std::vector<int32_t> x(3, 7);
        if (g.rank() == 0) {
            auto request = channel.start(all_reduce_of(x), true);
            std::thread aside([&] { CHECK(request->wait(20'000'000'000, true)); });
            usleep(20'000);
            CHECK(!request->done() && !request->queue()->awaited());
            std::thread waiter([&] { CHECK(request->wait(20'000'000'000)); });
            while (!request->queue()->awaited()) usleep(100);
            CHECK(g.channel(1).run({Op::barrier}) == Status::ok);
            aside.join();
            waiter.join();
            CHECK(x[2] == 14);
        } else {
            CHECK(g.channel(1).run({Op::barrier}) == Status::ok);
            CHECK(channel.run(all_reduce_of(x)) == Status::ok);
        }
    });
}

// Threads that start, wait, and close at any time: what waits is told, and nobody hangs.
TEST(closing_ends_what_others_wait_for) {
    for (int round = 0; round < 20; round++) {
        on_threads(2, [round](Group& g) {
            std::vector<int32_t> x(10), y(10);
            if (g.rank() == 1) {
                usleep(static_cast<useconds_t>(100 * round));
                g.close();
                return;
            }
            auto first = g.channel(1).start(all_reduce_of(x), round % 2 == 0);
            auto second = g.channel(1).start(all_reduce_of(y), true);
            std::thread waiter([&] { CHECK(second->complete()); });
            std::thread closer([&] {
                if (round % 3 == 0) g.close();
            });
            CHECK(first->complete());
            waiter.join();
            closer.join();
            CHECK(first->outcome().status != Status::ok && second->outcome().status != Status::ok);
        });
    }
}

// ---- one large operation at a time (core_lock.h) ------------------------------------------------

constexpr size_t kLargeCount = kLargeBytes / sizeof(int32_t) + 7;

// As `on_threads`, where the ranks' second channels have no cores.
void on_shared_cores(int n, const Body& body) {
    const int before = std::exchange(cores, n);
    on_threads(n, body);
    cores = before;
}

TEST(channels_with_cores_of_their_own_do_not_wait_for_each_other) {
    const int before = std::exchange(cores, 4);
    on_threads(2, [](Group& g) { CHECK(g.core_lock() == nullptr); });
    on_threads(3, [](Group& g) { CHECK(g.core_lock() != nullptr); });
    cores = before;
}

TEST(a_large_call_waits_while_its_rank_is_in_another_one) {
    on_shared_cores(2, [](Group& g) {
        std::vector<int32_t> x(kLargeCount, 1 + g.rank());
        if (g.rank() == 0) g.core_lock()->take();
        auto request = g.channel(1).start(all_reduce_of(x));
        if (g.rank() == 0) {
            usleep(150'000);  // longer than the progress thread would leave it in the queue
            CHECK(!request->done());
        }
        std::vector<int32_t> small(10, 1);  // these do not wait
        CHECK(g.run(all_reduce_of(small)) == Status::ok && small[9] == 2);
        if (g.rank() == 0) {
            CHECK(!request->done());
            g.core_lock()->give_up();
        }
        CHECK(request->wait(20'000'000'000) && request->outcome().status == Status::ok);
        CHECK(x.front() == 3 && x.back() == 3);
    });
}

// Rank 0 is in a large call that rank 1 makes only after the other one.
TEST(a_large_call_whose_peers_do_not_come_lets_the_other_channel_go_first) {
    on_shared_cores(2, [](Group& g) {
        for (int first : {0, 1}) {
            std::vector<int32_t> x(kLargeCount, 1), y(kLargeCount, 10);
            if (g.rank() == 0) {
                const OpSlot* slots = g.block(0).channel[first].slot;
                const auto arrivals = [&] { return slots[0].tick.load() + slots[1].tick.load(); };
                const uint32_t before = arrivals();
                std::thread early(
                    [&] { CHECK(g.channel(first).run(all_reduce_of(x)) == Status::ok); });
                while (arrivals() == before) usleep(100);
                CHECK(g.channel(1 - first).run(all_reduce_of(y)) == Status::ok);
                early.join();
            } else {
                CHECK(g.channel(1 - first).run(all_reduce_of(y)) == Status::ok);
                CHECK(g.channel(first).run(all_reduce_of(x)) == Status::ok);
            }
            CHECK(x.back() == 2 && y.back() == 20);
        }
    });
}

TEST(ranks_begin_and_await_large_calls_each_in_its_own_order) {
    for (int n : {2, 3}) {
        on_shared_cores(n, [n](Group& g) {
            for (int round = 0; round < 16; round++) {
                const auto bit = [&](int k) { return (round >> k ^ g.rank()) & 1; };
                std::vector<int32_t> x[kChannels];
                for (int c = 0; c < kChannels; c++) x[c].assign(kLargeCount, 10 * c + round);
                const int c = bit(0);
                auto first = g.channel(c).start(all_reduce_of(x[c]));
                if (round % 3 == 0) {
                    CHECK(g.channel(1 - c).run(all_reduce_of(x[1 - c])) == Status::ok);
                    CHECK(first->complete());
                } else {
                    auto second = g.channel(1 - c).start(all_reduce_of(x[1 - c]));
                    CHECK((bit(1) ? first : second)->complete());
                    CHECK((bit(1) ? second : first)->complete());
                    CHECK(second->outcome().status == Status::ok);
                }
                CHECK(first->outcome().status == Status::ok);
                for (int k = 0; k < kChannels; k++) {
                    CHECK(x[k].front() == n * (10 * k + round) && x[k].back() == x[k].front());
                }
            }
        });
    }
}

TEST(a_failure_on_one_channel_breaks_both) {
    on_threads(2, [](Group& g) {
        std::vector<int32_t> x(10), y(20);
        CHECK(g.channel(1).run(all_reduce_of(g.rank() == 0 ? x : y)) == Status::desync);
        CHECK(g.failure().channel == 1);
        CHECK(g.channel(0).run(all_reduce_of(x)) == Status::desync);
    });
}

}  // namespace
}  // namespace dure
