// Messages that are copied once: sizes around the threshold, ends in between, who waits for whom.
#include <signal.h>

#include "harness.h"
#include "mailbox.h"

namespace dure {
namespace {

using namespace dure::testing;

constexpr size_t kThreshold = 4096;

// Byte by byte the thread sanitizer would take most of the time.
__attribute__((no_sanitize("thread"))) void fill(uint8_t* to, size_t bytes, int seed) {
    for (size_t i = 0; i < bytes; i++) to[i] = static_cast<uint8_t>(i * 7 + i / 251 + seed);
}

std::vector<uint8_t> pattern(size_t bytes, int seed) {
    std::vector<uint8_t> v(bytes);
    fill(v.data(), bytes, seed);
    return v;
}

Status send(Mailbox& box, std::vector<uint8_t> v, int to, int tag = 0) {
    return box.send(block_of(v), DType::u8, to, tag).status;
}

std::vector<uint8_t> receive(Mailbox& box, size_t bytes, int from, int tag = 0) {
    std::vector<uint8_t> v(bytes, 0xEE);
    int source = -1;
    const Outcome out = box.receive(block_of(v), DType::u8, from, tag, &source);
    CHECK(out.status == Status::ok);
    CHECK(source == from || from == kAnySource);
    return v;
}

Status wait_for(const std::shared_ptr<Request>& request) {
    CHECK(request->wait(20'000'000'000));
    return request->outcome().status;
}

// `n` ranks, each with a mailbox, that copy messages of `threshold` bytes on once.
void between(int n, int64_t threshold, const std::function<void(Group&, Mailbox&)>& body,
             double timeout_s = 20) {
    single_copies = threshold;
    on_threads(
        n,
        [&body](Group& g) {
            Mailbox box(g);
            body(g, box);
            g.set_timeout(20'000'000'000);
            CHECK(g.run({Op::barrier}) == Status::ok);
            g.close();
            box.stop();
        },
        timeout_s);
}

// Until what is copied has begun to come; intended to look while another thread writes.
__attribute__((no_sanitize_thread)) void await_byte(const volatile uint8_t* byte, uint8_t value) {
    while (*byte != value) continue;
}

const std::vector<size_t> kSizes = {0,         1,     kThreshold - 1, kThreshold, kThreshold + 1,
                                    32 * 1024, 32769, 65536,          300'007,    1 << 20,
                                    5'000'001};

TEST(messages_around_the_threshold_arrive_in_order) {
    between(2, kThreshold, [](Group& g, Mailbox& box) {
        for (size_t bytes : kSizes) {
            for (int k = 0; k < 3; k++) {
                if (g.rank() == 0) CHECK(send(box, pattern(bytes, k), 1) == Status::ok);
                CHECK(receive(box, bytes, 1 - g.rank()) == pattern(bytes, k));
                if (g.rank() == 1) CHECK(send(box, pattern(bytes, k), 0) == Status::ok);
            }
        }
    });
}

TEST(more_offers_than_places_in_both_directions) {
    for (int64_t threshold : {int64_t{1}, static_cast<int64_t>(kThreshold)}) {
        between(3, threshold, [](Group& g, Mailbox& box) {
            constexpr int kMessages = 60;
            std::vector<std::vector<uint8_t>> out, in;
            std::vector<std::shared_ptr<Request>> requests;
            for (int k = 0; k < kMessages; k++) {
                const auto bytes = static_cast<size_t>(k * 997 % 20'000);
                for (int peer = 0; peer < 3; peer++) {
                    out.push_back(pattern(bytes, k + g.rank()));
                    in.push_back(std::vector<uint8_t>(bytes, 0xEE));
                }
            }
            for (size_t i = 0; i < out.size(); i++) {
                const auto peer = static_cast<int>(i % 3);
                if (peer == g.rank()) continue;
                requests.push_back(box.start_send(block_of(out[i]), DType::u8, peer, 0));
            }
            for (size_t i = 0; i < in.size(); i++) {
                const auto peer = static_cast<int>(i % 3);
                if (peer == g.rank()) continue;
                requests.push_back(box.start_receive(block_of(in[i]), DType::u8, peer, 0));
            }
            for (auto& t : requests) CHECK(wait_for(t) == Status::ok);
            for (size_t i = 0; i < in.size(); i++) {
                const auto peer = static_cast<int>(i % 3);
                if (peer != g.rank()) CHECK(in[i] == pattern(in[i].size(), int(i / 3) + peer));
            }
        });
    }
}

// Nine messages that no ring holds, and one behind them that is received first.
TEST(a_message_behind_more_offers_than_places_is_received_first) {
    between(2, kThreshold, [](Group& g, Mailbox& box) {
        constexpr int kMessages = 9;
        constexpr size_t kBytes = 1'000'000;
        if (g.rank() == 0) {
            std::vector<std::vector<uint8_t>> out;
            for (int k = 0; k < kMessages; k++) out.push_back(pattern(kBytes, k));
            std::vector<std::shared_ptr<Request>> sent;
            for (auto& data : out) sent.push_back(box.start_send(block_of(data), DType::u8, 1, 1));
            CHECK(send(box, {42}, 1, 2) == Status::ok);
            for (const auto& request : sent) CHECK(wait_for(request) == Status::ok);
        } else {
            CHECK(receive(box, 1, 0, 2) == std::vector<uint8_t>{42});
            for (int k = 0; k < kMessages; k++)
                CHECK(receive(box, kBytes, 0, 1) == pattern(kBytes, k));
        }
    });
}

TEST(offers_are_matched_by_tag_and_from_any_source) {
    between(3, kThreshold, [](Group& g, Mailbox& box) {
        if (g.rank() == 0) {
            CHECK(receive(box, 50'000, kAnySource, 2) == pattern(50'000, 2));
            CHECK(receive(box, 400'000, 1, 1) == pattern(400'000, 1));
            CHECK(receive(box, 3, 1, 3) == pattern(3, 3));
        } else if (g.rank() == 1) {
            auto large = pattern(400'000, 1), small = pattern(3, 3);
            auto a = box.start_send(block_of(large), DType::u8, 0, 1);
            auto b = box.start_send(block_of(small), DType::u8, 0, 3);
            CHECK(wait_for(a) == Status::ok && wait_for(b) == Status::ok);
        } else {
            CHECK(send(box, pattern(50'000, 2), 0, 2) == Status::ok);
        }
    });
}

TEST(a_receive_that_does_not_fit_leaves_the_offer) {
    between(2, kThreshold, [](Group& g, Mailbox& box) {
        auto x = pattern(500'000, 5);
        if (g.rank() == 0) {
            CHECK(send(box, x, 1) == Status::ok);
        } else {
            std::vector<uint8_t> wrong(500'001);
            int source = -1;
            CHECK(box.receive(block_of(wrong), DType::u8, 0, 0, &source).status ==
                  Status::mismatch);
            CHECK(receive(box, x.size(), 0) == x);
        }
    });
}

// What fits into the ring need not be awaited, though it is offered first.
TEST(an_offer_that_nobody_takes_goes_through_the_ring) {
    between(2, kThreshold, [](Group& g, Mailbox& box) {
        const size_t most = g.ring_bytes() / 4 * 3 - 64;
        for (size_t bytes : {kThreshold, size_t{100'000}, most}) {
            if (g.rank() == 0) CHECK(send(box, pattern(bytes, 1), 1) == Status::ok);
            CHECK(g.run({Op::barrier}) == Status::ok);
            if (g.rank() == 1) CHECK(receive(box, bytes, 0) == pattern(bytes, 1));
            CHECK(g.run({Op::barrier}) == Status::ok);
        }
    });
}

// Nor need the first of many, while the last have no place for their offers yet.
TEST(the_first_of_many_offers_goes_through_the_ring) {
    between(2, kThreshold, [](Group& g, Mailbox& box) {
        constexpr size_t kMessages = 2 * kOffers + 1, kBytes = 50'000;
        auto out = pattern(kBytes, g.rank());
        std::vector<std::shared_ptr<Request>> sent;
        for (size_t k = 0; k < kMessages; k++) {
            sent.push_back(box.start_send(block_of(out), DType::u8, 1 - g.rank(), 0));
        }
        CHECK(wait_for(sent[0]) == Status::ok);
        CHECK(g.run({Op::barrier}) == Status::ok);
        for (size_t k = 0; k < kMessages; k++) {
            CHECK(receive(box, kBytes, 1 - g.rank()) == pattern(kBytes, 1 - g.rank()));
        }
        for (auto& request : sent) CHECK(wait_for(request) == Status::ok);
    });
}

// ---- ends in between ----------------------------------------------------------------------------

// A send of `bytes` is late; then its peer receives what is sent after it, and nothing of it.
void send_in_vain(int64_t threshold, size_t bytes) {
    between(
        2, threshold,
        [bytes](Group& g, Mailbox& box) {
            auto given_up = pattern(bytes, 1), then = pattern(bytes, 2), small = pattern(9, 3);
            if (g.rank() == 1) {
                g.set_timeout(20'000'000'000);
                CHECK(g.run({Op::barrier}) == Status::ok);
                CHECK(receive(box, bytes, 0) == then);
                CHECK(receive(box, 9, kAnySource) == small);
                return;
            }
            const Outcome out = box.send(block_of(given_up), DType::u8, 1, 0);
            CHECK(out.status == Status::late && out.missing == std::vector<int>{1});
            std::fill(given_up.begin(), given_up.end(), uint8_t{0xEE});
            g.set_timeout(20'000'000'000);
            CHECK(g.run({Op::barrier}) == Status::ok);
            CHECK(box.send(block_of(then), DType::u8, 1, 0).status == Status::ok);
            CHECK(box.send(block_of(small), DType::u8, 1, 0).status == Status::ok);
        },
        0.2);
}

TEST(an_offer_in_vain_leaves_nothing) { send_in_vain(kThreshold, 1 << 20); }
TEST(half_a_message_in_the_ring_leaves_nothing) { send_in_vain(kNoSingleCopies, 1 << 20); }

// The receiver has taken some of the message when the sender gives up: its receive takes the next.
TEST(a_receive_that_loses_its_message_takes_the_next) {
    for (int64_t threshold : {kNoSingleCopies, int64_t{1} << 40}) {
        between(2, threshold, [](Group& g, Mailbox& box) {
            const size_t bytes = 1 << 20;
            auto first = pattern(bytes, 1), second = pattern(bytes, 2), third = pattern(bytes, 3);
            if (g.rank() == 1) {
                std::vector<uint8_t> got(bytes), kept(bytes);
                auto posted = box.start_receive(block_of(got), DType::u8, 0, 0);
                CHECK(wait_for(posted) == Status::ok && got == first);
                CHECK(g.run({Op::barrier}) == Status::ok);
                // Nobody asks for the second one, so it fills the ring.
                CHECK(g.run({Op::barrier}) == Status::ok);
                CHECK(g.run({Op::barrier}) == Status::ok);
                CHECK(receive(box, bytes, 0) == third);
                return;
            }
            CHECK(box.send(block_of(first), DType::u8, 1, 0).status == Status::ok);
            CHECK(g.run({Op::barrier}) == Status::ok);  // it reads what comes while it reads
            g.set_timeout(100'000'000);
            CHECK(box.send(block_of(second), DType::u8, 1, 0).status == Status::late);
            g.set_timeout(20'000'000'000);
            CHECK(g.run({Op::barrier}) == Status::ok);
            CHECK(g.run({Op::barrier}) == Status::ok);
            CHECK(box.send(block_of(third), DType::u8, 1, 0).status == Status::ok);
        });
    }
}

// A receive whose time is over amid a message leaves it, whole, to another.
TEST(a_late_receive_leaves_its_message_to_another) {
    between(2, kNoSingleCopies, [](Group& g, Mailbox& box) {
        const size_t bytes = 1 << 20;
        auto x = pattern(bytes, 1);
        if (g.rank() == 0) {
            auto sent = box.start_send(block_of(x), DType::u8, 1, 0);
            CHECK(g.run({Op::barrier}) == Status::ok);
            CHECK(wait_for(sent) == Status::ok);
            return;
        }
        CHECK(g.run({Op::barrier}) == Status::ok);
        for (int k = 0; k < 20; k++) {
            std::vector<uint8_t> got(bytes);
            g.set_timeout(1);  // a nanosecond: some of it comes, or all
            int source = -1;
            const Status s = box.receive(block_of(got), DType::u8, 0, 0, &source).status;
            g.set_timeout(20'000'000'000);
            CHECK(s == Status::ok || s == Status::late);
            if (s != Status::ok) continue;
            CHECK(got == x);
            return;
        }
        CHECK(receive(box, bytes, 0) == x);
    });
}

// ---- who waits for whom -------------------------------------------------------------------------

TEST(without_eager_bytes_a_send_waits_for_its_receive) {
    for (int64_t threshold : {kNoSingleCopies, static_cast<int64_t>(kThreshold)}) {
        between(2, threshold, [](Group& g, Mailbox& box) {
            box.set_eager_bytes(0);
            for (size_t bytes : {size_t{0}, size_t{8}, size_t{5000}, size_t{300'000}}) {
                auto x = pattern(bytes, 4);
                if (g.rank() == 0) {
                    auto sent = box.start_send(block_of(x), DType::u8, 1, 0);
                    CHECK(!sent->wait(2'000'000));
                    CHECK(g.run({Op::barrier}) == Status::ok);
                    CHECK(wait_for(sent) == Status::ok);
                } else {
                    CHECK(g.run({Op::barrier}) == Status::ok);
                    CHECK(receive(box, bytes, 0) == x);
                }
            }
        });
    }
}

TEST(two_sends_that_wait_for_each_other_are_late) {
    between(
        2, kThreshold,
        [](Group& g, Mailbox& box) {
            box.set_eager_bytes(16);
            CHECK(send(box, pattern(16, 1), 1 - g.rank(), 5) == Status::ok);
            CHECK(send(box, pattern(17, 1), 1 - g.rank()) == Status::late);
            g.set_timeout(20'000'000'000);
            CHECK(g.run({Op::barrier}) == Status::ok);
            CHECK(receive(box, 16, 1 - g.rank(), 5) == pattern(16, 1));
        },
        0.1);
}

TEST(a_message_to_oneself_may_wait_too) {
    between(
        1, kThreshold,
        [](Group&, Mailbox& box) {
            box.set_eager_bytes(0);
            CHECK(send(box, pattern(10, 1), 0) == Status::late);
            auto x = pattern(10, 2);
            auto sent = box.start_send(block_of(x), DType::u8, 0, 0);
            CHECK(!sent->done());
            CHECK(receive(box, 10, 0) == x);
            CHECK(wait_for(sent) == Status::ok);
        },
        0.1);
}

// ---- processes ----------------------------------------------------------------------------------

TEST(processes_copy_once_between_their_memories) {
    single_copies = kThreshold;
    on_processes(2, [](Group& g) {
        CHECK(g.copies().permitted && g.copies().once_bytes == kThreshold);
        Mailbox box(g);
        for (size_t bytes : kSizes) {
            if (g.rank() == 0) CHECK(send(box, pattern(bytes, 1), 1) == Status::ok);
            CHECK(receive(box, bytes, 1 - g.rank()) == pattern(bytes, 1));
            if (g.rank() == 1) CHECK(send(box, pattern(bytes, 1), 0) == Status::ok);
        }
        CHECK(g.run({Op::barrier}) == Status::ok);
        g.close();
    });
}

// What may be tried out at the beginning can be forbidden later.
TEST(a_message_goes_through_the_ring_where_the_kernel_refuses) {
    in_child([] {
        single_copies = kThreshold;
        on_processes(2, [](Group& g) {
            Mailbox box(g);
            CHECK(g.copies().permitted);
            forbid_single_copies();
            CHECK(g.run({Op::barrier}) == Status::ok);
            const size_t bytes = 1 << 20;
            if (g.rank() == 0) CHECK(send(box, pattern(bytes, 1), 1) == Status::ok);
            if (g.rank() == 1) CHECK(receive(box, bytes, 0) == pattern(bytes, 1));
            CHECK(g.run({Op::barrier}) == Status::ok);
            g.close();
        });
    });
}

// The sender is killed, or stopped, when the first piece of a large message has come. The receiver
// copies alone, so it needs a sender only to live.
void end_amid_a_message(int signal) {
    single_copies = kThreshold;
    const size_t bytes = size_t{256} << 20;
    on_processes(2, [signal, bytes](Group& g) {
        Mailbox box(g);
        std::vector<uint8_t> x(bytes, g.rank() == 1 ? 7 : 0);
        if (g.rank() == 1) {
            box.send(block_of(x), DType::u8, 0, 0);
            pause();
        }
        std::thread watches([&x, signal, pid = g.pid_of(1)] {
            await_byte(x.data(), 7);
            kill(pid, signal);
        });
        int source = -1;
        const Outcome out = box.receive(block_of(x), DType::u8, 1, 0, &source);
        watches.join();
        if (signal == SIGKILL) {
            CHECK(out.status == Status::peer_lost && out.peer == 1);
        } else {
            CHECK(out.status == Status::ok);
            CHECK(x == std::vector<uint8_t>(bytes, 7));
            kill(g.pid_of(1), SIGKILL);
        }
        g.close();
    });
}

TEST(a_sender_that_dies_amid_a_message_is_lost) { end_amid_a_message(SIGKILL); }
TEST(a_message_arrives_from_a_sender_that_is_stopped) { end_amid_a_message(SIGSTOP); }

}  // namespace
}  // namespace dure
