// Messages of several senders to several threads: none is lost, none comes twice, nobody sleeps
// through one, and tickets call their threads away.
#include <set>

#include "harness.h"
#include "inbox.h"

namespace dure {
namespace {

using namespace dure::testing;
using Ticket = Inbox::Ticket;
using Got = Inbox::Got;

constexpr int64_t kPatientNs = 30'000'000'000;

std::shared_ptr<Outbox> outbox_of(const Inbox& inbox) {
    auto self = Process::of(getpid(), start_time_of(getpid()), SymmetricHeap::of_process().file());
    auto outbox = Outbox::claim(self, inbox.offset());
    CHECK(outbox != nullptr);
    return outbox;
}

void send(Outbox& outbox, const std::string& message) {
    while (!outbox.send(reinterpret_cast<const std::byte*>(message.data()), message.size()))
        sched_yield();
}

Got next(Inbox& inbox, const std::shared_ptr<Ticket>& mine, int64_t deadline_ns,
         std::string& message) {
    Got got = inbox.take(mine, false, message);
    while (got == Got::nothing) {
        inbox.wait(mine, deadline_ns);
        got = inbox.take(mine, true, message);
        if (now_ns() >= deadline_ns) break;
    }
    return got;
}

TEST(all_arrive_once_at_whoever_is_free) {
    constexpr int kSenders = 4, kReceivers = 4, kEach = 3'000;
    Inbox inbox;
    std::mutex lock;
    std::set<std::string> got;
    int count = 0;
    std::vector<std::thread> threads;
    for (int s = 0; s < kSenders; s++) {
        threads.emplace_back([&inbox, s] {
            auto outbox = outbox_of(inbox);
            for (int n = 0; n < kEach; n++) {
                send(*outbox, std::to_string(s * kEach + n) + std::string(n % 700, 'x'));
                if (n % 500 == 0) usleep(200);  // long enough that receivers sleep
            }
        });
    }
    for (int r = 0; r < kReceivers; r++) {
        threads.emplace_back([&] {
            std::string message;
            while (next(inbox, nullptr, now_ns() + kPatientNs, message) == Got::message) {
                std::lock_guard hold(lock);
                got.insert(message);
                if (++count == kSenders * kEach) inbox.close();
            }
        });
    }
    for (auto& thread : threads) thread.join();
    CHECK(count == kSenders * kEach);
    CHECK(got.size() == size_t{kSenders * kEach});
}

// Each call is answered through a ring to the caller's own inbox; whoever reads an answer completes
// the ticket of the one that waits for it.
TEST(callers_get_their_answers_and_nobody_waits_for_ever) {
    constexpr int kCallers = 3, kCalls = 1'500;
    Inbox server, client;
    std::vector<std::shared_ptr<Ticket>> tickets(size_t{kCallers} * kCalls);
    for (auto& ticket : tickets) ticket = std::make_shared<Ticket>();
    std::vector<std::thread> threads;
    for (int k = 0; k < 2; k++) {
        threads.emplace_back([&] {
            auto back = outbox_of(client);
            std::string message;
            while (next(server, nullptr, now_ns() + kPatientNs, message) == Got::message)
                send(*back, message);
        });
    }
    std::atomic<int> callers{kCallers};
    for (int c = 0; c < kCallers; c++) {
        threads.emplace_back([&, c] {
            auto out = outbox_of(server);
            std::string message;
            for (int n = 0; n < kCalls; n++) {
                const size_t mine = static_cast<size_t>(c * kCalls + n);
                send(*out, std::to_string(mine));
                while (true) {
                    const Got got = next(client, tickets[mine], now_ns() + kPatientNs, message);
                    CHECK(got == Got::message || got == Got::done);
                    if (got == Got::done) break;
                    client.complete(tickets[std::stoul(message)]);
                }
                if (n % 300 == 0) usleep(200);
            }
            if (--callers == 0) server.close();
        });
    }
    for (auto& thread : threads) thread.join();
}

// More threads wait for tickets than there are bits: what is posted is for the one that has none.
TEST(what_is_posted_wakes_the_thread_without_a_ticket_among_many) {
    constexpr int kWaiters = 70, kPosts = 20;
    Inbox inbox;
    std::vector<std::thread> threads;
    for (int w = 0; w < kWaiters; w++) {
        threads.emplace_back([&] {
            std::string message;
            const auto mine = std::make_shared<Ticket>();
            CHECK(next(inbox, mine, now_ns() + 2 * kPatientNs, message) == Got::closed);
        });
    }
    std::atomic<int> got{0};
    threads.emplace_back([&] {
        std::string message;
        while (next(inbox, nullptr, now_ns() + 2 * kPatientNs, message) == Got::message) got++;
    });
    const int64_t begin = now_ns();
    for (int n = 0; n < kPosts; n++) {
        usleep(2'000);  // long enough that all sleep
        inbox.post("one");
        while (got.load() <= n && now_ns() < begin + kPatientNs) usleep(100);
        CHECK(got.load() == n + 1);
    }
    inbox.close();
    for (auto& thread : threads) thread.join();
}

// Each pair of messages is served by two threads, for the first waits for the second: whether that
// one comes through a ring or is posted, and after short calls, which one thread serves alone.
TEST(a_long_call_is_followed_by_another_thread) {
    constexpr int kPairs = 60, kShort = 40;
    Inbox inbox;
    auto outbox = outbox_of(inbox);
    std::atomic<int> firsts{0}, seconds{0}, shorts{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 2; t++) {
        threads.emplace_back([&] {
            std::string message;
            while (next(inbox, nullptr, now_ns() + kPatientNs, message) == Got::message) {
                if (message == "short") shorts++;
                if (message == "second") seconds++;
                if (message != "first") continue;
                const int number = ++firsts;
                const int64_t begin = now_ns();
                while (seconds < number && now_ns() < begin + kPatientNs) sched_yield();
                CHECK(seconds >= number);
            }
        });
    }
    for (int n = 0; n < kPairs; n++) {
        for (int k = 0; k < kShort; k++) send(*outbox, "short");
        send(*outbox, "first");
        while (firsts <= n) sched_yield();
        if (n % 3 == 1) usleep(300);  // long enough that the other one sleeps
        if (n % 2)
            send(*outbox, "second");
        else
            inbox.post("second");
        while (seconds <= n) sched_yield();
    }
    inbox.close();
    for (auto& thread : threads) thread.join();
    CHECK(shorts == kPairs * kShort);
}

// Two threads receive, and one of them serves a message. A patient message that is sent in that
// time wakes the other one when the sender calls `remind`, and not before, if it was sent soon
// enough.
TEST(a_patient_sender_wakes_nobody_while_a_thread_serves_a_short_call) {
    constexpr int kRounds = 40;
    Inbox inbox;
    auto outbox = outbox_of(inbox);
    std::atomic<int> firsts{0}, seconds{0}, leave{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 2; t++) {
        threads.emplace_back([&] {
            std::string message;
            while (next(inbox, nullptr, now_ns() + kPatientNs, message) == Got::message) {
                if (message == "second") seconds++;
                if (message != "first") continue;
                const int number = ++firsts;
                while (leave < number) sched_yield();
            }
        });
    }
    const std::string second = "second";
    int quiet = 0;
    for (int n = 0; n < kRounds; n++) {
        usleep(3'000);  // long enough that both sleep
        send(*outbox, "first");
        while (firsts <= n) relax();
        const int64_t before = now_ns();
        CHECK(outbox->send(reinterpret_cast<const std::byte*>(second.data()), 6, true));
        const int64_t due = outbox->due_ns(), latest = now_ns() + kBackNs;
        CHECK(due == INT64_MAX || (before + kBackNs <= due && due <= latest));
        usleep(2'000);  // long enough that one that was woken takes it
        quiet += due != INT64_MAX && seconds == n;
        outbox->remind();
        CHECK(outbox->due_ns() == INT64_MAX);
        const int64_t begin = now_ns();
        while (seconds <= n && now_ns() < begin + kPatientNs) usleep(50);
        CHECK(seconds == n + 1);
        leave++;
    }
    inbox.close();
    for (auto& thread : threads) thread.join();
    CHECK(quiet > 0);
}

// A thread that waits for an answer looks for it instead of one that has looked before it came.
TEST(who_has_a_ticket_looks_instead_of_who_has_none) {
    constexpr int kRounds = 60;
    Inbox inbox;
    auto outbox = outbox_of(inbox);
    std::atomic<int> questions{0};
    std::shared_ptr<Ticket> ticket;
    std::thread without([&] {
        std::string message;
        while (next(inbox, nullptr, now_ns() + kPatientNs, message) == Got::message) {
            if (message == "question") questions++;
            if (message == "answer") inbox.complete(ticket);
        }
    });
    int got = 0;
    for (int n = 0; n < kRounds; n++) {
        ticket = std::make_shared<Ticket>();
        send(*outbox, "question");
        while (questions <= n) sched_yield();
        std::thread sender([&] {
            usleep(60);  // until both look or sleep
            send(*outbox, "answer");
        });
        std::string message;
        got += next(inbox, ticket, now_ns() + kPatientNs, message) == Got::message;
        sender.join();
    }
    inbox.close();
    without.join();
    CHECK(got > kRounds / 2);
}

TEST(all_that_wait_for_one_ticket_are_called) {
    Inbox inbox;
    const auto ticket = std::make_shared<Ticket>();
    std::vector<std::thread> threads;
    for (int w = 0; w < 3; w++) {
        threads.emplace_back([&] {
            std::string message;
            const int64_t begin = now_ns();
            CHECK(next(inbox, ticket, begin + 2 * kPatientNs, message) == Got::done);
            CHECK(now_ns() < begin + kPatientNs);
        });
    }
    usleep(20'000);  // long enough that all sleep
    inbox.complete(ticket);
    for (auto& thread : threads) thread.join();
}

TEST(a_deadline_passes_and_a_closed_inbox_says_so) {
    Inbox inbox;
    std::string message;
    CHECK(next(inbox, nullptr, now_ns() + 1'000'000, message) == Got::nothing);
    inbox.post("one");
    auto ticket = std::make_shared<Ticket>();
    CHECK(next(inbox, ticket, now_ns(), message) == Got::nothing);
    CHECK(next(inbox, nullptr, now_ns(), message) == Got::message && message == "one");
    inbox.close();
    CHECK(next(inbox, nullptr, now_ns() + kPatientNs, message) == Got::closed);
}

TEST(messages_cross_the_end_of_a_ring_whole) {
    Inbox inbox;
    auto outbox = outbox_of(inbox);
    std::string message;
    for (size_t bytes = 0; bytes <= kMostBytes; bytes += 997) {
        const std::string sent(bytes, static_cast<char>('a' + bytes % 26));
        send(*outbox, sent);
        CHECK(next(inbox, nullptr, now_ns() + kPatientNs, message) == Got::message);
        CHECK(message == sent);
    }
    CHECK(!outbox->send(nullptr, kMostBytes + 1));
}

}  // namespace
}  // namespace dure
