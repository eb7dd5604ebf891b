// The flight recorder: what it keeps, what is overwritten, and readers beside writers.
#include <thread>

#include "flight.h"
#include "harness.h"
#include "request.h"

namespace dure {
namespace {

using namespace dure::testing;

Flight::Start start_of(Op op, uint64_t bytes) {
    Flight::Start s;
    s.op = op;
    s.dtype = DType::bf16;
    s.reduction = Reduction::max;
    s.async = true;
    s.channel = 1;
    s.seq = 5;
    s.peer = 3;
    s.tag = 77;
    s.bytes = bytes;
    return s;
}

TEST(an_entry_tells_what_was_called_and_how_it_ended) {
    Flight flight;
    const int64_t before = now_ns();
    const uint64_t first = flight.begin(start_of(Op::all_reduce, 10));
    const uint64_t second = flight.begin(start_of(Op::send, 20));
    flight.end(first, Status::desync);
    const auto entries = flight.entries();
    CHECK(entries.size() == 2 && entries[0].number == first && entries[1].number == second);
    const Flight::Entry& e = entries[0];
    CHECK(e.start.op == Op::all_reduce && e.start.dtype == DType::bf16);
    CHECK(e.start.reduction == Reduction::max && e.start.async && e.start.bytes == 10);
    CHECK(e.start.peer == 3 && e.start.tag == 77);
    CHECK(e.status == static_cast<uint8_t>(Status::desync));
    CHECK(e.start.channel == 1 && e.start.seq == 5);
    // The counter's rate is known to about a thousandth after so short a time.
    CHECK(e.start_ns > before - 1'000'000 && e.end_ns >= e.start_ns);
    CHECK(e.end_ns < now_ns() + 1'000'000);
    CHECK(entries[1].status == Flight::kRunning && entries[1].end_ns == 0);
}

TEST(the_oldest_entries_go_and_their_ends_touch_nothing) {
    Flight flight;
    const uint64_t old = flight.begin(start_of(Op::barrier, 0));
    for (size_t i = 0; i < Flight::kEntries; i++) flight.begin(start_of(Op::barrier, i));
    flight.end(old, Status::timeout);
    const auto entries = flight.entries();
    CHECK(entries.size() == Flight::kEntries && entries.front().number == old + 1);
    for (const auto& e : entries) CHECK(e.status == Flight::kRunning);
}

TEST(a_reader_sees_whole_entries_while_others_write) {
    Flight flight;
    std::atomic<bool> stop{false};
    std::thread writer([&] {
        for (uint64_t i = 1; !stop.load(); i++) {
            flight.end(flight.begin(start_of(i % 2 ? Op::send : Op::recv, i)), Status::ok);
        }
    });
    size_t seen = 0;
    while (seen < 20000) {
        for (const auto& e : flight.entries()) {
            CHECK(e.start.bytes == e.number);
            CHECK(e.start.op == (e.number % 2 ? Op::send : Op::recv));
            seen++;
        }
    }
    stop = true;
    writer.join();
}

TEST(a_request_writes_its_end_whichever_comes_first) {
    for (int round = 0; round < 500; round++) {
        auto flight = std::make_shared<Flight>();
        auto request = std::make_shared<Request>();
        const uint64_t entry = flight->begin(start_of(Op::all_gather, 1));
        std::thread finisher([request] {
            Outcome out;
            out.status = Status::peer_lost;
            request->finish(std::move(out));
        });
        request->record(flight, entry);
        finisher.join();
        CHECK(flight->entries()[0].status == static_cast<uint8_t>(Status::peer_lost));
    }
}

}  // namespace
}  // namespace dure
