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
// round trip between ranks 0 and 1, while the others wait in a barrier.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
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

struct Rank {
    Group& group;
    Mailbox mailbox{group};
    std::byte* memory = nullptr;
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
        std::printf("%-12s %10zu B  %10.3f us  (least %.3f)\n", name.c_str(), bytes,
                    times[kSamples / 2], times[0]);
        std::fflush(stdout);
    }
}

void round_trip(Rank& me, size_t bytes) {
    const Block block{me.memory, bytes};
    int source = -1;
    if (me.group.rank() == 0) {
        require(me.mailbox.send(block, DType::u8, 1, 0).status);
        require(me.mailbox.receive(block, DType::u8, 1, 0, &source).status);
    } else if (me.group.rank() == 1) {
        require(me.mailbox.receive(block, DType::u8, 0, 0, &source).status);
        require(me.mailbox.send(block, DType::u8, 0, 0).status);
    }
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
        std::printf("%-12s %10d B  %10.3f us  (nine of ten %.3f)\n", "start", 1 << 20, times[100],
                    times[180]);
    }
}

void run(Group& group, const std::vector<std::string>& wanted) {
    Rank me{group};
    const size_t most = kSizes[std::size(kSizes) - 1];
    me.memory = static_cast<std::byte*>(
        mmap(nullptr, most, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
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
    for (size_t bytes : kSizes) {
        if (!wants("sendrecv") || group.size() == 1) break;
        std::memset(me.memory, 1, bytes);
        measure(me, "sendrecv", bytes, 0.5, [&] { round_trip(me, bytes); });
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
    auto first = Group::create({0, n, timeout_ns, cores, copies, migrates}, 1);
    const int parent = getpid();
    for (int r = 1; r < n; r++) {
        if (fork() != 0) continue;
        auto group =
            Group::attach({r, n, timeout_ns, cores, copies, migrates}, parent, first->file(), 1);
        while (group->attached() < n) group->wait_attached(1'000'000);
        group->ready();
        run(*group, wanted);
        std::_Exit(0);
    }
    while (first->attached() < n) first->wait_attached(1'000'000);
    first->ready();
    run(*first, wanted);
    while (wait(nullptr) > 0) continue;
}
