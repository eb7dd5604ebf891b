// What the core alone costs, without Python: barriers, small reductions, messages,
// starting an asynchronous operation.
//
//     cmake -S . -B build/native-plain -G Ninja -DDURE_TESTS=ON
//     cmake --build build/native-plain --target native_messages
//     [COPIES=BYTES] [STAY=1] build/native-plain/native_messages [ranks [cores [operation]...]]
//
// COPIES: from how many bytes on to copy once (-2: never); else that is learnt (message_ways.h).
// STAY: ranks that share a core do not move (cores.cpp), as without `dure run`.
//
// Ranks are forked processes. A sample is k operations back to back, the slowest rank's time / k;
// shown are the median and the least of the samples, in microseconds. A message's time is half a
// round trip between ranks 0 and 1, while the others wait in a barrier: of one tensor, which each
// rank sends on as it was received; or `apart`, of two, so that what is sent is never written.
// `staged` and `once` are round trips of the copies alone, as a floor: through a ring of four
// pieces in shared memory, and by one process_vm_readv of the receiver.
#include <sys/mman.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "channel.h"
#include "mailbox.h"

namespace dure {
namespace {

constexpr int kSamples = 15;
constexpr double kSampleUs = 15'000;
constexpr size_t kSizes[] = {8,       4 << 10,  16 << 10, 64 << 10,
                             1 << 20, 16 << 20, 64 << 20, 256 << 20};
constexpr size_t kSmall = 3;  // the first of kSizes are small all_reduces
constexpr size_t kLeastCopied = 64 << 10;

// Copies from one process to another, and nothing else.
class BareCopies {
  public:
    void send_staged(Block from) {
        for (size_t at = 0; at < from.bytes; at += kPiece, sent_++) {
            while (sent_ - taken_.load(std::memory_order_acquire) >= kPieces) relax();
            std::memcpy(place(sent_), from.data + at, std::min(kPiece, from.bytes - at));
            shown_.store(sent_ + 1, std::memory_order_release);
        }
    }

    void receive_staged(Block to) {
        for (size_t at = 0; at < to.bytes; at += kPiece, received_++) {
            while (shown_.load(std::memory_order_acquire) <= received_) relax();
            std::memcpy(to.data + at, place(received_), std::min(kPiece, to.bytes - at));
            taken_.store(received_ + 1, std::memory_order_release);
        }
    }

    void send_once(Block from) {
        from_ = from.data;
        process_ = getpid();
        shown_.store(++sent_, std::memory_order_release);
        while (taken_.load(std::memory_order_acquire) < sent_) relax();
    }

    // False: the kernel does not allow it.
    bool receive_once(Block to) {
        while (shown_.load(std::memory_order_acquire) <= received_) relax();
        const iovec into{to.data, to.bytes}, out_of{from_, to.bytes};
        const ssize_t copied = process_vm_readv(process_, &into, 1, &out_of, 1, 0);
        taken_.store(++received_, std::memory_order_release);
        return copied == static_cast<ssize_t>(to.bytes);
    }

  private:
    static constexpr size_t kPiece = 64 << 10, kPieces = 4;
    std::byte* place(uint64_t number) { return bytes_ + number % kPieces * kPiece; }

    alignas(64) std::atomic<uint64_t> shown_;
    alignas(64) std::atomic<uint64_t> taken_;
    alignas(64) uint64_t sent_;  // the sender's
    std::byte* from_;
    pid_t process_;
    alignas(64) uint64_t received_;  // the receiver's
    alignas(4096) std::byte bytes_[kPieces * kPiece];
};

struct Rank {
    Group& group;
    BareCopies* bare;  // from each of ranks 0 and 1 to the other
    Mailbox mailbox{group};
    std::byte* memory = nullptr;
    std::byte* received = nullptr;  // where messages go
};

void require(Status status) {
    if (status == Status::ok) return;
    std::fprintf(stderr, "failed with status %d\n", static_cast<int>(status));
    std::_Exit(1);
}

double slowest(Rank& me, double value) {
    require(me.group.all_reduce({reinterpret_cast<std::byte*>(&value), sizeof value}, DType::f64,
                                Reduction::max));
    return value;
}

// Microseconds an operation.
template <typename F>
double sample(Rank& me, size_t k, F operation) {
    require(me.group.run({Op::barrier}));
    const int64_t began = now_ns();
    for (size_t i = 0; i < k; i++) operation();
    return slowest(me, static_cast<double>(now_ns() - began) / 1e3 / static_cast<double>(k));
}

template <typename F>
void measure(Rank& me, const std::string& name, size_t bytes, double share, F operation) {
    const double first = std::max(sample(me, 2, operation), 0.01);
    const auto k = static_cast<size_t>(std::clamp(kSampleUs / first, 1.0, 1e5));
    std::vector<double> times;
    for (int i = 0; i < kSamples; i++) times.push_back(sample(me, k, operation) * share);
    std::sort(times.begin(), times.end());
    if (me.group.rank() == 0) {
        std::printf("%-16s %10zu B  %10.3f us  (least %.3f)\n", name.c_str(), bytes,
                    times[kSamples / 2], times[0]);
        std::fflush(stdout);
    }
}

void round_trip(Rank& me, size_t bytes) {
    const Block block{me.memory, bytes}, into{me.received, bytes};
    int source = -1;
    if (me.group.rank() == 0) {
        require(me.mailbox.send(block, DType::u8, 1, 0).status);
        require(me.mailbox.receive(into, DType::u8, 1, 0, &source).status);
    } else if (me.group.rank() == 1) {
        require(me.mailbox.receive(into, DType::u8, 0, 0, &source).status);
        require(me.mailbox.send(block, DType::u8, 0, 0).status);
    }
}

void staged_round_trip(Rank& me, size_t bytes) {
    const Block block{me.memory, bytes}, into{me.received, bytes};
    if (me.group.rank() == 0) {
        me.bare[0].send_staged(block);
        me.bare[1].receive_staged(into);
    } else if (me.group.rank() == 1) {
        me.bare[0].receive_staged(into);
        me.bare[1].send_staged(block);
    }
}

void round_trip_once(Rank& me, size_t bytes) {
    const Block block{me.memory, bytes}, into{me.received, bytes};
    bool copied = true;
    if (me.group.rank() == 0) {
        me.bare[0].send_once(block);
        copied = me.bare[1].receive_once(into);
    } else if (me.group.rank() == 1) {
        copied = me.bare[0].receive_once(into);
        me.bare[1].send_once(block);
    }
    require(copied ? Status::ok : Status::internal);
}

// How long the caller of an asynchronous operation is held up.
void measure_start(Rank& me) {
    std::vector<double> times;
    for (int i = 0; i < 200; i++) {
        usleep(1000);
        const int64_t began = now_ns();
        auto request = me.group.channel(0).start(
            {Op::all_reduce, DType::f32, Reduction::sum, -1, {}, {{me.memory, size_t{1} << 20}}});
        times.push_back(static_cast<double>(now_ns() - began) / 1e3);
        while (!request->wait(1'000'000'000)) continue;
    }
    std::sort(times.begin(), times.end());
    if (me.group.rank() == 0) {
        std::printf("%-16s %10d B  %10.3f us  (nine of ten %.3f)\n", "start", 1 << 20, times[100],
                    times[180]);
    }
}

void run(Group& group, BareCopies* bare, const std::vector<std::string>& wanted) {
    Rank me{group, bare};
    const size_t most = kSizes[std::size(kSizes) - 1];
    me.memory = static_cast<std::byte*>(
        mmap(nullptr, 2 * most, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    auto wants = [&](const char* name) {
        return wanted.empty() || std::find(wanted.begin(), wanted.end(), name) != wanted.end();
    };
    if (wants("barrier")) measure(me, "barrier", 0, 1, [&] { require(group.run({Op::barrier})); });
    for (size_t i = 0; i < kSmall && wants("all_reduce"); i++) {
        std::memset(me.memory, 0, kSizes[i]);
        measure(me, "all_reduce", kSizes[i], 1, [&] {
            require(group.all_reduce({me.memory, kSizes[i]}, DType::f32, Reduction::sum));
        });
    }
    for (size_t i = 0; i < kSmall + 2 && wants("async"); i++) {
        std::memset(me.memory, 0, kSizes[i]);
        measure(me, "async", kSizes[i], 1, [&] {
            const Block tensor{me.memory, kSizes[i]};
            auto request = group.channel(0).start(
                {Op::all_reduce, DType::f32, Reduction::sum, -1, {}, {tensor}}, kSizes[i] <= 32768);
            require(request->complete() ? request->outcome().status : Status::interrupted);
        });
    }
    for (const bool apart : {false, true}) {
        if (!wants("sendrecv") || group.size() == 1) break;
        me.received = me.memory + (apart ? most : 0);
        const std::string suffix = apart ? ", apart" : "";
        for (size_t bytes : kSizes) {
            std::memset(me.memory, 1, bytes);
            std::memset(me.received, 1, bytes);
            measure(me, "sendrecv" + suffix, bytes, 0.5, [&] { round_trip(me, bytes); });
            if (bytes < kLeastCopied) continue;
            measure(me, "staged" + suffix, bytes, 0.5, [&] { staged_round_trip(me, bytes); });
            measure(me, "once" + suffix, bytes, 0.5, [&] { round_trip_once(me, bytes); });
        }
    }
    if (wants("start")) measure_start(me);
    require(group.run({Op::barrier}));
    group.close();
    me.mailbox.stop();
}

}  // namespace
}  // namespace dure

int main(int argc, char** argv) {
    using namespace dure;
    const int n = argc > 1 ? std::atoi(argv[1]) : 2;
    const int cores =
        argc > 2 ? std::atoi(argv[2]) : static_cast<int>(std::thread::hardware_concurrency());
    const char* asked = std::getenv("COPIES");
    const int64_t copies = asked ? std::atoll(asked) : kLearnCopies;
    const std::vector<std::string> wanted(argv + std::min(argc, 3), argv + argc);
    const bool migrates = !std::getenv("STAY");
    const int64_t timeout_ns = 30'000'000'000;
    auto* bare =
        static_cast<BareCopies*>(mmap(nullptr, 2 * sizeof(BareCopies), PROT_READ | PROT_WRITE,
                                      MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    auto first = Group::create({0, n, timeout_ns, cores, copies, migrates}, 1);
    const int parent = getpid();
    for (int r = 1; r < n; r++) {
        if (fork() != 0) continue;
        auto group =
            Group::attach({r, n, timeout_ns, cores, copies, migrates}, parent, first->file(), 1);
        while (group->attached() < n) group->wait_attached(1'000'000);
        group->ready();
        run(*group, bare, wanted);
        std::_Exit(0);
    }
    while (first->attached() < n) first->wait_attached(1'000'000);
    first->ready();
    run(*first, bare, wanted);
    while (wait(nullptr) > 0) continue;
}
