// No rank writes into the memory of another after a failed call, even if it was kept from its core
// and believes that the call continues: the memory belongs to the caller again.
#include <signal.h>
#include <sys/mman.h>
#include <sys/uio.h>

#include "harness.h"
#include "mailbox.h"

namespace {

// What all processes of a test see.
struct Shared {
    std::atomic<bool> stops{false};     // the next writer stops itself before it writes
    std::atomic<bool> finished{false};  // the rank that sends has left its call
};

Shared& shared() {
    static Shared* const all = new (mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE,
                                         MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Shared;
    return *all;
}

}  // namespace

// In place of the C library's: a rank that the system stops after its last look, before its write.
extern "C" ssize_t process_vm_writev(pid_t process, const iovec* local, unsigned long num_local,
                                     const iovec* remote, unsigned long num_remote,
                                     unsigned long flags) {
    if (shared().stops.exchange(false)) raise(SIGSTOP);
    return syscall(SYS_process_vm_writev, process, local, num_local, remote, num_remote, flags);
}

namespace dure {
namespace {

using namespace dure::testing;

constexpr size_t kBytes = size_t{8} << 20;
constexpr int64_t kLongNs = 20'000'000'000;

// Rank 1 sends, or broadcasts, kBytes to rank 0.
Status move(Group& g, Mailbox& box, Op op, Block data) {
    if (op == Op::broadcast) {
        return g.run({op, DType::u8, Reduction::none, 1, {}, {data}});
    }
    int source = -1;
    return g.rank() == 1 ? box.send(data, DType::u8, 0, 0).status
                         : box.receive(data, DType::u8, 1, 0, &source).status;
}

// Whether or not rank 0's call fails, its memory is its own when the call has returned.
void reuse_after(Op op) {
    single_copies = 4096;
    shared().finished = false;
    on_processes(
        2,
        [op](Group& g) {
            Mailbox box(g);
            std::vector<uint8_t> data(kBytes, 7);
            if (g.rank() == 1) {
                shared().stops = true;
                move(g, box, op, block_of(data));
                shared().finished = true;
                g.close();
                return;
            }
            std::fill(data.begin(), data.end(), uint8_t{0});
            move(g, box, op, block_of(data));
            std::fill(data.begin(), data.end(), uint8_t{1});
            kill(g.pid_of(1), SIGCONT);
            for (const int64_t until = now_ns() + kLongNs; !shared().finished;) {
                CHECK(now_ns() < until);
            }
            CHECK(data == std::vector<uint8_t>(kBytes, 1));
            g.close();
        },
        1);
}

TEST(memory_of_a_receive_is_its_callers_again) { reuse_after(Op::recv); }
TEST(memory_of_a_broadcast_is_its_callers_again) { reuse_after(Op::broadcast); }

// Let `body` run between two ranks with tensors in heaps; rank 1 ends when it writes into rank 0's.
void in_heaps(const std::function<void(Group&, Mailbox&, Block)>& body) {
    single_copies = kLearnCopies;
    on_processes(2, [&body](Group& g) {
        Mailbox box(g);
        const auto memory = g.heap().allocate(kBytes, true);
        const Block data{memory->data, kBytes};
        std::fill_n(data.data, kBytes, g.rank() == 1 ? std::byte{7} : std::byte{0});
        double place = 0;
        if (g.rank() == 0) place = static_cast<double>(g.find_in_heap(data.data, kBytes));
        CHECK(g.all_reduce({reinterpret_cast<std::byte*>(&place), sizeof place}, DType::f64,
                           Reduction::sum) == Status::ok);
        if (g.rank() == 1) {
            signal(SIGSEGV, SIG_DFL);  // a sanitizer would report it
            CHECK(mprotect(g.at(static_cast<uint64_t>(place)), kBytes, PROT_READ) == 0);
        }
        body(g, box, data);
        g.close();
        box.stop();
    });
}

TEST(a_message_leaves_the_heap_of_its_receiver_alone) {
    in_heaps([](Group& g, Mailbox& box, Block data) {
        CHECK(move(g, box, Op::recv, data) == Status::ok);
        CHECK(std::count(data.data, data.data + kBytes, std::byte{7}) == kBytes);
        CHECK(g.run({Op::barrier}) == Status::ok);
    });
}

// The root writes there. So what a failed broadcast was given, no rank sees any more.
TEST(memory_in_the_heap_is_private_after_a_broadcast_that_failed) {
    in_heaps([](Group& g, Mailbox& box, Block data) {
        CHECK(g.rank() == 1 || g.find_in_heap(data.data, kBytes) != 0);
        CHECK(move(g, box, Op::broadcast, data) == Status::peer_lost);
        CHECK(g.find_in_heap(data.data, kBytes) == 0);
    });
}

}  // namespace
}  // namespace dure
