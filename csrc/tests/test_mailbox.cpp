// Point to point: order, tags, any source, sizes around the ring, threads.
#include "harness.h"
#include "mailbox.h"

namespace dure {
namespace {

using namespace dure::testing;

std::vector<int32_t> filled(size_t count, int32_t value) {
    return std::vector<int32_t>(count, value);
}

Status wait_for(const std::shared_ptr<Request>& request) {
    CHECK(request->wait(20'000'000'000));
    return request->outcome().status;
}

TEST(messages_pass_around_a_circle) {
    on_threads(3, [](Group& g) {
        Mailbox box(g);
        const int next = (g.rank() + 1) % 3, previous = (g.rank() + 2) % 3;
        for (size_t count : {0, 1, 5, 1000, 65532, 65536, 65537, 300007}) {
            auto out = filled(count, g.rank()), in = filled(count, -1);
            auto sent = box.start_send(block_of(out), DType::i32, next, 7);
            int source = -1;
            CHECK(box.receive(block_of(in), DType::i32, previous, 7, &source).status == Status::ok);
            CHECK(source == previous && in == filled(count, previous));
            CHECK(wait_for(sent) == Status::ok);
        }
        g.run({Op::barrier});
        g.close();
        box.stop();
    });
}

TEST(tags_are_matched_out_of_order) {
    on_threads(2, [](Group& g) {
        Mailbox box(g);
        auto small = filled(3, 1), large = filled(200'000, 2);
        int source;
        if (g.rank() == 0) {
            auto a = box.start_send(block_of(large), DType::i32, 1, 1);
            auto b = box.start_send(block_of(small), DType::i32, 1, 2);
            CHECK(wait_for(a) == Status::ok && wait_for(b) == Status::ok);
        } else {
            auto x = filled(3, 0), y = filled(200'000, 0);
            CHECK(box.receive(block_of(x), DType::i32, 0, 2, &source).status == Status::ok);
            CHECK(box.receive(block_of(y), DType::i32, kAnySource, 1, &source).status ==
                  Status::ok);
            CHECK(x == small && y == large && source == 0);
        }
        g.run({Op::barrier});
        g.close();
        box.stop();
    });
}

TEST(a_receive_that_does_not_fit_fails_and_leaves_the_message) {
    on_threads(2, [](Group& g) {
        Mailbox box(g);
        auto x = filled(10, g.rank());
        if (g.rank() == 0) {
            CHECK(box.send(block_of(x), DType::i32, 1, 0).status == Status::ok);
        } else {
            int source;
            auto wrong = filled(11, -1);
            CHECK(box.receive(block_of(wrong), DType::i32, 0, 0, &source).status ==
                  Status::mismatch);
            CHECK(wrong == filled(11, -1));
            CHECK(box.receive(block_of(x), DType::f32, 0, 0, &source).status == Status::mismatch);
            CHECK(box.receive(block_of(x), DType::i32, 0, 0, &source).status == Status::ok);
            CHECK(x == filled(10, 0));
        }
        g.run({Op::barrier});
        g.close();
        box.stop();
    });
}

TEST(a_rank_sends_to_itself) {
    on_threads(1, [](Group& g) {
        Mailbox box(g);
        auto out = filled(200'000, 3), in = filled(200'000, 0);
        auto posted = box.start_receive(block_of(in), DType::i32, 0, 0);
        CHECK(box.send(block_of(out), DType::i32, 0, 0).status == Status::ok);
        CHECK(wait_for(posted) == Status::ok && in == out && posted->source() == 0);
        CHECK(box.send(block_of(out), DType::i32, 0, 1).status == Status::ok);
        int source;
        CHECK(box.receive(block_of(in), DType::i32, kAnySource, 1, &source).status == Status::ok);
        g.close();
        box.stop();
    });
}

TEST(many_requests_at_once_in_both_directions) {
    on_threads(2, [](Group& g) {
        Mailbox box(g);
        const int peer = 1 - g.rank();
        constexpr int kMessages = 200;
        std::vector<std::vector<int32_t>> out, in;
        for (int k = 0; k < kMessages; k++) {
            out.push_back(filled(static_cast<size_t>(k * 37), k));
            in.push_back(filled(static_cast<size_t>(k * 37), -1));
        }
        std::vector<std::shared_ptr<Request>> requests;
        for (auto& x : in) requests.push_back(box.start_receive(block_of(x), DType::i32, peer, 0));
        for (auto& x : out) requests.push_back(box.start_send(block_of(x), DType::i32, peer, 0));
        for (auto& t : requests) CHECK(wait_for(t) == Status::ok);
        CHECK(in == out);
        g.run({Op::barrier});
        g.close();
        box.stop();
    });
}

TEST(a_receive_nobody_answers_is_late_and_the_group_stays_whole) {
    on_threads(
        2,
        [](Group& g) {
            Mailbox box(g);
            auto x = filled(4, g.rank());
            int source;
            if (g.rank() == 1) {
                g.set_timeout(20'000'000'000);
            } else {
                Outcome out = box.receive(block_of(x), DType::i32, 1, 9, &source);
                CHECK(out.status == Status::late && out.missing == std::vector<int>{1});
                g.set_timeout(20'000'000'000);
            }
            CHECK(g.run({Op::barrier}) == Status::ok);
            g.close();
            box.stop();
        },
        0.3);
}

TEST(closing_ends_requests) {
    on_threads(2, [](Group& g) {
        Mailbox box(g);
        auto x = filled(4, 0);
        auto pending = box.start_receive(block_of(x), DType::i32, 1 - g.rank(), 0);
        g.run({Op::barrier});
        g.close();
        box.stop();
        CHECK(wait_for(pending) == Status::aborted ||
              pending->outcome().status == Status::peer_left);
    });
}

}  // namespace
}  // namespace dure
