// Blocking messages: the quick way, where it must give way to the long one, and the ring's edges.
#include "harness.h"
#include "mailbox.h"

namespace dure {
namespace {

using namespace dure::testing;

std::vector<int32_t> counted(size_t count, int32_t from) {
    std::vector<int32_t> v(count);
    for (size_t i = 0; i < count; i++) v[i] = from + static_cast<int32_t>(i);
    return v;
}

// Two ranks, each with a mailbox; all is over for both before either leaves.
void between_two(const std::function<void(Group&, Mailbox&)>& body) {
    on_threads(2, [&body](Group& g) {
        Mailbox box(g);
        body(g, box);
        CHECK(g.run({Op::barrier}) == Status::ok);
        g.close();
        box.stop();
    });
}

Status send(Mailbox& box, std::vector<int32_t> v, int to, int tag) {
    return box.send(block_of(v), DType::i32, to, tag).status;
}

// What was received, if all went well.
std::vector<int32_t> receive(Mailbox& box, size_t count, int from, int tag) {
    std::vector<int32_t> v(count, -1);
    int source = -1;
    CHECK(box.receive(block_of(v), DType::i32, from, tag, &source).status == Status::ok);
    CHECK(source == from || from == kAnySource);
    return v;
}

TEST(messages_of_all_lengths_go_round_the_ring_many_times) {
    between_two([](Group& g, Mailbox& box) {
        for (int k = 0; k < 2000; k++) {
            const auto count = static_cast<size_t>(k * 37 % 1500);
            if (g.rank() == 0) CHECK(send(box, counted(count, k), 1, 3) == Status::ok);
            if (g.rank() == 1) CHECK(receive(box, count, 0, 3) == counted(count, k));
        }
    });
}

TEST(a_message_meets_its_answer) {
    between_two([](Group& g, Mailbox& box) {
        const int peer = 1 - g.rank();
        for (size_t count : {1, 4000, 4096, 4097, 16384, 49152, 70000, 262144, 1'000'003}) {
            for (int k = 0; k < 5; k++) {
                if (g.rank() == 0) CHECK(send(box, counted(count, k), peer, 0) == Status::ok);
                CHECK(receive(box, count, peer, 0) == counted(count, k));
                if (g.rank() == 1) CHECK(send(box, counted(count, k), peer, 0) == Status::ok);
            }
        }
    });
}

TEST(three_quarters_of_a_ring_are_sent_to_nobody) {
    between_two([](Group& g, Mailbox& box) {
        const size_t count = g.ring_bytes() / 4 * 3 / sizeof(int32_t) - 16;
        for (int k = 0; k < 5; k++) {
            if (g.rank() == 0) CHECK(send(box, counted(count, k), 1, 0) == Status::ok);
            CHECK(g.run({Op::barrier}) == Status::ok);
            if (g.rank() == 1) CHECK(receive(box, count, 0, 0) == counted(count, k));
            CHECK(g.run({Op::barrier}) == Status::ok);
        }
    });
}

TEST(lengths_around_what_a_frame_holds_arrive) {
    between_two([](Group& g, Mailbox& box) {
        for (size_t bytes : {1, 39, 40, 41, 63, 64, 65, 104}) {
            for (uint8_t k = 1; k < 5; k++) {
                std::vector<uint8_t> x(bytes + 1, g.rank() == 0 ? k : 0);
                const Block block{reinterpret_cast<std::byte*>(x.data()), bytes};
                int source = -1;
                if (g.rank() == 0) {
                    CHECK(box.send(block, DType::u8, 1, 0).status == Status::ok);
                } else {
                    CHECK(box.receive(block, DType::u8, 0, 0, &source).status == Status::ok);
                    std::vector<uint8_t> expected(bytes, k);
                    expected.push_back(0);  // nothing beyond the message has been touched
                    CHECK(x == expected);
                }
            }
        }
    });
}

// Small messages use up the frames while there is room for bytes.
TEST(as_many_small_messages_as_there_are_frames_are_sent_to_nobody) {
    between_two([](Group& g, Mailbox& box) {
        const auto frames = static_cast<int32_t>(g.ring_frames());
        std::vector<std::vector<int32_t>> later;
        std::vector<std::shared_ptr<Request>> sent;
        if (g.rank() == 0) {
            for (int32_t k = 0; k < frames - 1; k++) CHECK(send(box, {k}, 1, 0) == Status::ok);
            for (int32_t k = frames - 1; k < 3 * frames; k++) later.push_back({k});
            for (auto& x : later) sent.push_back(box.start_send(block_of(x), DType::i32, 1, 0));
            CHECK(!sent.back()->done());
        }
        CHECK(g.run({Op::barrier}) == Status::ok);
        if (g.rank() == 1) {
            for (int32_t k = 0; k < 3 * frames; k++) {
                CHECK(receive(box, 1, 0, 0) == counted(1, k));
            }
        }
        for (auto& request : sent) {
            CHECK(request->wait(20'000'000'000) && request->outcome().status == Status::ok);
        }
    });
}

TEST(an_earlier_request_gets_the_earlier_message) {
    between_two([](Group& g, Mailbox& box) {
        for (int k = 0; k < 200; k++) {
            if (g.rank() == 0) {
                for (int i = 0; i < 3; i++) CHECK(send(box, {3 * k + i}, 1, 0) == Status::ok);
                continue;
            }
            std::vector<int32_t> early(1);
            auto posted = box.start_receive(block_of(early), DType::i32, 0, 0);
            CHECK(receive(box, 1, 0, 0) == counted(1, 3 * k + 1));
            CHECK(posted->wait(20'000'000'000) && early == counted(1, 3 * k));
            CHECK(receive(box, 1, 0, 0) == counted(1, 3 * k + 2));
        }
    });
}

TEST(a_message_passed_over_is_still_the_first_of_its_tag) {
    between_two([](Group& g, Mailbox& box) {
        if (g.rank() == 0) {
            CHECK(send(box, {1, 2}, 1, 7) == Status::ok && send(box, {3}, 1, 8) == Status::ok);
            CHECK(send(box, {4, 5}, 1, 7) == Status::ok);
        } else {
            CHECK(receive(box, 1, 0, 8) == counted(1, 3));
            CHECK(receive(box, 2, 0, 7) == counted(2, 1));
            CHECK(receive(box, 2, 0, 7) == counted(2, 4));
        }
    });
}

TEST(threads_of_a_rank_wait_for_a_tag_each) {
    constexpr int kThreads = 3, kMessages = 300;
    between_two([](Group& g, Mailbox& box) {
        std::vector<std::thread> threads;
        for (int tag = 0; tag < kThreads; tag++) {
            threads.emplace_back([&g, &box, tag] {
                for (int k = 0; k < kMessages; k++) {
                    const auto count = static_cast<size_t>(1 + k * 100);
                    if (g.rank() == 0) CHECK(send(box, counted(count, k), 1, tag) == Status::ok);
                    if (g.rank() == 1) CHECK(receive(box, count, 0, tag) == counted(count, k));
                }
            });
        }
        for (std::thread& t : threads) t.join();
    });
}

// Rank 0's first thread holds its mailbox while it asks, in vain, where rank 1 is.
TEST(a_thread_that_must_wait_for_the_mailbox_says_so_before) {
    static std::atomic<bool> asked, told, over;
    static thread_local bool listening = false;
    on_threads(
        2,
        [](Group& g) {
            if (g.rank() == 1) {
                while (!over) usleep(100);
                return g.close();
            }
            g.set_about_to_wait([] { told = told || listening; });
            Mailbox box(g);
            std::thread waits([&box] {
                std::vector<int32_t> x(1);
                int source = -1;
                const Outcome out = box.receive(block_of(x), DType::i32, 1, 0, &source);
                CHECK(out.status == Status::late);
            });
            while (!asked) usleep(100);
            listening = true;
            CHECK(send(box, {1}, 1, 0) == Status::ok);
            CHECK(told);
            waits.join();
            over = true;
            g.close();
        },
        0.05,
        [](Group& g) {
            if (g.rank() == 0) return;
            g.set_where([] {
                asked = true;
                for (int i = 0; i < 10'000 && !told; i++) usleep(100);
                return std::string();
            });
        });
}

TEST(a_message_too_large_to_keep_fails_the_receives_of_others) {
    single_copies = kNoSingleCopies;  // else its data stay where they are
    on_threads(2, [](Group& g) {
        Mailbox box(g);
        auto x = counted(100'000, 0);
        if (g.rank() == 0) {
            Block endless = block_of(x);
            endless.bytes = size_t{1} << 63;  // never read beyond what the ring takes
            auto sent = box.start_send(endless, DType::i32, 1, 0);
            CHECK(g.run({Op::barrier}) == Status::ok);
            CHECK(g.run({Op::barrier}) == Status::ok);
            g.close();
            box.stop();
            CHECK(sent->done() && sent->outcome().status != Status::ok);
        } else {
            CHECK(g.run({Op::barrier}) == Status::ok);
            int source = -1;
            Outcome out = box.receive(block_of(x), DType::i32, 0, 9, &source);
            CHECK(out.status == Status::no_memory && out.peer == 0);
            auto posted = box.start_receive(block_of(x), DType::i32, kAnySource, 9);
            CHECK(posted->wait(20'000'000'000));
            CHECK(posted->outcome().status == Status::no_memory);
            CHECK(g.run({Op::barrier}) == Status::ok);
            g.close();
            box.stop();
        }
    });
}

}  // namespace
}  // namespace dure
