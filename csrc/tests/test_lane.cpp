// Asynchronous collectives: order, results, and the end of a group with work in its queue.
#include "harness.h"
#include "lane.h"

namespace dure {
namespace {

using namespace dure::testing;

Call all_reduce_of(std::vector<int32_t>& x) {
    return {Op::all_reduce, DType::i32, Reduction::sum, -1, {}, {block_of(x)}};
}

TEST(operations_run_in_the_order_of_their_start) {
    on_threads(3, [](Group& g) {
        Lane lane(g);
        std::vector<std::vector<int32_t>> tensors;
        std::vector<std::shared_ptr<Ticket>> tickets;
        for (int k = 0; k < 100; k++) {
            tensors.emplace_back(static_cast<size_t>(1 + k * 100), k + g.rank());
        }
        for (auto& x : tensors) tickets.push_back(lane.start(all_reduce_of(x)));
        for (int k = 0; k < 100; k++) {
            auto at = static_cast<size_t>(k);
            CHECK(tickets[at]->wait(20'000'000'000));
            CHECK(tickets[at]->outcome().status == Status::ok);
            CHECK(tensors[at].front() == 3 * k + 3 && tensors[at].back() == 3 * k + 3);
        }
        CHECK(lane.idle());
        g.close();
        lane.stop();
    });
}

TEST(closing_aborts_what_is_queued) {
    on_threads(2, [](Group& g) {
        Lane lane(g);
        std::vector<int32_t> x(10), y(10);
        std::shared_ptr<Ticket> first, second;
        if (g.rank() == 0) {
            first = lane.start(all_reduce_of(x));
            second = lane.start(all_reduce_of(y));
        }
        g.close();
        lane.stop();
        if (g.rank() == 0) {
            CHECK(first->done() && first->outcome().status != Status::ok);
            CHECK(second->done() && second->outcome().status != Status::ok);
            CHECK(lane.start(all_reduce_of(x))->outcome().status == Status::aborted);
        }
    });
}

}  // namespace
}  // namespace dure
