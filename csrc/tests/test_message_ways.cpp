// Messages of one kind try both ways, and then take the quicker one.
#include "harness.h"
#include "mailbox.h"
#include "message_ways.h"

namespace dure {
namespace {

using namespace dure::testing;

TEST(kinds_are_lengths_between_powers_of_two_and_whether_in_a_heap) {
    CHECK(message_kind(16 * 1024 + 1, false) == 0);
    CHECK(message_kind(32 * 1024, false) == 0);
    CHECK(message_kind(32 * 1024 + 1, false) == 1);
    CHECK(message_kind(8 << 20, false) == 8);
    CHECK(message_kind((8 << 20) + 1, false) == 9);
    CHECK(message_kind(size_t{1} << 40, false) == 9);
    CHECK(message_kind(32 * 1024, true) == 10);
    CHECK(message_kind(size_t{1} << 40, true) == 19);
}

TEST(twelve_messages_try_the_ways_and_the_others_do_as_shown) {
    SentWays ways;
    for (int period = 0; period < 2; period++) {
        for (int i = 0; i < 12; i++) {
            const MessageWay way = ways.next(3, 0xFFFF);
            CHECK(way.once == (i >= 6));
            const bool timed = i >= 2 && i != 6 && i != 7;
            CHECK(way.trial.number == (timed ? i : Trial::kNone));
            CHECK(way.trial.kind == 3);
        }
        for (int i = 12; i < 1024; i++) {
            const MessageWay way = ways.next(3, i % 2 ? 8 : 0xFFF7);
            CHECK(way.once == (i % 2 == 1));
            CHECK(way.trial.number == Trial::kNone);
        }
    }
    for (int i = 0; i < 2; i++) CHECK(!ways.next(2, 0).once);
    CHECK(ways.next(2, 0).trial.number == 2);  // each kind has its own count
}

TEST(a_single_copy_is_taken_if_it_saves_an_eighth_without_the_longest_times) {
    ReceivedWays ways;
    const auto note = [&](int16_t number, int64_t ns, size_t bytes = 1000) {
        return ways.note({0, number, 5}, bytes, ns);
    };
    for (const int16_t number : {2, 3, 4}) CHECK(note(number, 800) == 0);
    CHECK(note(5, 9000) == 0);
    CHECK(note(8, 690) == 32);  // once: bit 5
    CHECK(note(9, 9000) == 32);
    CHECK(note(10, 730) == 0);   // the mean of 690 and 730 is 710, and 7 / 8 of 800 are 700
    CHECK(note(11, 670) == 32);  // 697
    CHECK(ways.note({0, 2, 7}, 1000, 100) == 32);
    CHECK(ways.note({0, 8, 7}, 2000, 170) == 32 + 128);  // for each byte
    // Another period: the old times no longer count, and a way that was not timed loses.
    CHECK(note(2, 5000) == 128);
}

// ---- real messages ------------------------------------------------------------------------------

std::vector<uint8_t> pattern(size_t bytes, int seed) {
    std::vector<uint8_t> v(bytes);
    for (size_t i = 0; i < bytes; i++) v[i] = static_cast<uint8_t>(i * 7 + i / 251 + seed);
    return v;
}

Status send(Mailbox& box, std::vector<uint8_t> v, int tag = 0) {
    return box.send(block_of(v), DType::u8, 1, tag).status;
}

std::vector<uint8_t> receive(Mailbox& box, size_t bytes, int tag = 0) {
    std::vector<uint8_t> v(bytes, 0xEE);
    int source = -1;
    CHECK(box.receive(block_of(v), DType::u8, 0, tag, &source).status == Status::ok);
    return v;
}

TEST(messages_of_all_kinds_arrive_while_both_ways_are_tried) {
    single_copies = kLearnCopies;
    on_processes(2, [](Group& g) {
        CHECK(g.copies().learns && g.copies().permitted);
        Mailbox box(g);
        for (const size_t bytes : {16384UL, 16385UL, 40000UL, 65536UL, 300001UL, 9000000UL}) {
            for (int i = 0; i < 20; i++) {
                if (g.rank() == 0) CHECK(send(box, pattern(bytes, i)) == Status::ok);
                if (g.rank() == 1) CHECK(receive(box, bytes) == pattern(bytes, i));
            }
        }
        CHECK(g.run({Op::barrier}) == Status::ok);
        g.close();
    });
}

// Receives are posted long after each message, so none is copied once. Each message that is meant
// for the ring follows 500 others, so if offers were counted, they would be the quicker way.
TEST(a_message_that_nobody_took_in_time_counts_for_neither_way) {
    single_copies = kLearnCopies;
    on_processes(2, [](Group& g) {
        Mailbox box(g);
        const size_t bytes = 100'000;
        for (int i = 0; i < 12; i++) {
            const int others = i < 6 ? 500 : 0;
            if (g.rank() == 0) {
                for (int k = 0; k < others; k++) CHECK(send(box, {1}, 1) == Status::ok);
                CHECK(send(box, pattern(bytes, i)) == Status::ok);
            }
            CHECK(g.run({Op::barrier}) == Status::ok);
            if (g.rank() == 0) continue;
            CHECK(receive(box, bytes) == pattern(bytes, i));
            for (int k = 0; k < others; k++) receive(box, 1, 1);
        }
        if (g.rank() == 1) CHECK(g.ring(0, 1).once.load() == 0);
        CHECK(g.run({Op::barrier}) == Status::ok);
        g.close();
    });
}

}  // namespace
}  // namespace dure
