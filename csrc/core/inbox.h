// Messages from the other processes of this host, for whichever thread of this one is free.
//
// Note "Inbox". A process has one, in its symmetric heap: a bell, and rings of bytes. A process
// that often sends claims one of the rings (`Outbox`), and is then its only writer; the owner of
// the inbox is the only reader. A message is its length and its bytes, at a multiple of eight.
//
// *Any number of threads ask for the next message.* Whoever finds one leaves with it: nothing is
// handed from thread to thread, and a thread that serves a call keeps nobody from receiving. A
// thread that waits for something of its own, the answer to a call, brings a *ticket*: it takes
// messages meanwhile, and is called away when another thread, which has read its answer, completes
// it.
//
// *Waking.* One thread at a time may look at the rings without sleeping; it does so for a short
// time if there was a message not long ago, for then another often follows, and gives its core away
// now and then to whom it may be looking out for. The others sleep on the bell, each under one of
// 32 bits: the upper half is for threads with tickets, which do not take what is posted, and no
// thread of one kind is ever woken in place of one of the other. One with a ticket looks instead of
// one without, which would have to wake it for its answer. The page says whom a sender is to wake:
// nobody while somebody looks, or was woken and has not taken anything yet; the one with a ticket,
// if one sleeps, for what comes is most likely its answer; else any.
//
// *Short calls stay in one thread.* Threads of Python run one at a time, and to hand a message to a
// second one costs more than a short call. So a thread takes its message with Python's lock held
// (`wait`, then `take`): none is in the hands of a thread that cannot run. And a thread without a
// ticket that is woken while another one serves a message dozes until that one had kBackNs to come
// back for the next; meanwhile nobody else is woken. Only if it does not, for its call is a long
// one, the dozing thread takes over. The more often it was not needed, the longer it dozes. A
// sender that waits for the answer itself is *patient*: it wakes nobody in these kBackNs
// (`served_us`), and rings afterwards, if its message is still there. One that is stopped, or loses
// Python's lock, before it has rung is like one stopped as said below.
//
// *The bell.* A sender writes, and then looks whom to wake; a thread that is about to sleep says
// so, and then looks at the rings once more. Both are fenced, so one of them sees the other.
//
// A sender takes `wake` before it rings. One that is stopped between the two, some instructions
// apart, keeps all messages waiting until a thread that waits for them looks by itself, within 5 s
// (rpc/workers.py). The other way round each message of a burst would ring, which costs as much as
// all else of it; and a sender that clears `wake` late could clear the wish of a later sleeper.
//
// A sender that dies in the middle of a message has not shown it: `written` moves last. Its ring is
// free again when the owner says so (`forget`), with what was shown read before.
//
// Cost: one line for the length and the first bytes, two for the counters; 5 us where nobody
// looks. Messages that do not fit are refused, and go elsewhere.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "futex.h"
#include "process.h"
#include "symmetric_heap.h"

namespace dure {

constexpr int kRings = 16;
constexpr size_t kRingBytes = 64 * 1024;
constexpr size_t kMostBytes = kRingBytes / 4;  // of one message
constexpr int64_t kBackNs = 50'000;            // so long a short call takes

struct MessageRing {
    Word sender;  // its pid; 0: nobody's
    alignas(64) std::atomic<uint64_t> written;
    alignas(64) std::atomic<uint64_t> read;
    alignas(64) std::byte data[kRingBytes];
};

struct InboxPage {
    uint64_t magic;
    alignas(64) Word bell;
    Word wake;       // the bits of those of whom a sender is to wake one
    Word served_us;  // when a thread without a ticket last left with a message; 0: it is back
    alignas(64) MessageRing rings[kRings];
};

class Inbox {
  public:
    static constexpr uint64_t kMagic = 0x786f626e69657275;

    // Something that a thread waits for, and another one brings.
    struct Ticket {
        bool done = false;
        int sleepers = 0;
        uint32_t bits = 0;  // of the threads that sleep with it
    };
    enum class Got { message, done, nothing, closed };

    // Throws std::bad_alloc where the host has no memory left.
    Inbox();

    // Where a peer finds it in this process' heap.
    uint64_t offset() const;
    // Wait until `deadline_ns` for a message, or for `mine`, which may be null. A `take` must
    // follow.
    void wait(const std::shared_ptr<Ticket>& mine, int64_t deadline_ns);
    // Take what is there, without waiting. `waited`: `wait` came before.
    Got take(const std::shared_ptr<Ticket>& mine, bool waited, std::string& message);
    void complete(const std::shared_ptr<Ticket>& ticket);
    // Leave a message for a thread of this process that has no ticket.
    void post(std::string message);
    // End all waits, now and later.
    void close();
    // Free the ring of a process that has ended. False, and the ring stays: there are messages in
    // it.
    bool forget(int pid);

  private:
    Got what_is_there(const std::shared_ptr<Ticket>& mine, std::string& message);
    bool is_something_there(const Ticket* mine) const;
    bool read(std::string& message);
    bool pending() const;
    bool look_around(bool ticketed, int64_t until_ns);
    void sleep(Ticket* mine, int64_t deadline_ns);
    void doze();
    uint32_t preferred() const;
    void wake(uint32_t bits, int most);
    void wake_for_posted();

    std::shared_ptr<HeapMemory> memory_;
    InboxPage& page_;
    std::mutex lock_;
    std::deque<std::string> posted_;
    std::array<int, 32> sleepers_{};  // threads by their bit
    uint32_t sleeping_ = 0;           // the bits of those that sleep
    uint32_t next_place_ = 0;
    bool looking_ = false;
    bool looks_without_ = false;       // who looks has no ticket
    std::atomic<uint64_t> look_{0};    // which look around it is
    bool dozing_ = false;              // a thread without a ticket
    int64_t doze_ns_ = 0;              // how long the next one does
    int woken_ = 0;                    // threads that have waited, and have not taken anything yet
    int woken_without_ = 0;            // those of them without tickets
    int64_t served_ns_ = 0;            // when a thread without a ticket last left with a message,
    std::thread::id served_by_;        // and which one; 0, or none, if it is back
    std::atomic<bool> called_{false};  // who looks is to stop
    bool closed_ = false;
    int first_ = 0;        // the ring that is looked at first
    int64_t last_ns_ = 0;  // when a message came
};

// The way to another process' inbox: one ring of it.
class Outbox {
  public:
    // Null where all rings are taken, or there is no inbox.
    static std::shared_ptr<Outbox> claim(const std::shared_ptr<Process>& peer, uint64_t offset);
    ~Outbox();
    Outbox(const Outbox&) = delete;
    Outbox& operator=(const Outbox&) = delete;

    // False: it does not fit, now or ever. `patient`: the sender waits for the answer, and calls
    // `remind` if there is none at `due_ns`.
    bool send(const std::byte* data, size_t bytes, bool patient = false);
    // Ring for what was sent and is not read yet.
    void remind();
    // When to: kBackNs after the first message that may be unread was sent without a ring.
    int64_t due_ns() const;

  private:
    void ring();
    Outbox(std::shared_ptr<Process> peer, InboxPage& page, MessageRing& ring)
        : peer_(std::move(peer)), page_(page), ring_(ring) {}

    const std::shared_ptr<Process> peer_;
    InboxPage& page_;
    MessageRing& ring_;
    std::mutex lock_;
    std::atomic<int64_t> due_ns_{INT64_MAX};
    const int pid_ = getpid();
};

}  // namespace dure
