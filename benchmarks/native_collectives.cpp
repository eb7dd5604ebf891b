// The core's collectives without Python, beside a prototype that sets the mark.
//
//   cmake -S . -B build/bench -G Ninja -DDURE_BENCHMARKS=ON && cmake --build build/bench
//   build/bench/native_collectives [ranks [samples [op [bytes...]]]]
//
// Contestants take turns, sample by sample: `plain` is the engine on ordinary memory, `heap` on
// tensors of the symmetric heap, and `direct`, for the float32 all_reduce, is not the engine at all
// but the least that can be done on shared memory: a barrier, each rank reduces its slice of all
// tensors into all tensors, a barrier. A sample is k operations back to back, the slowest rank's
// time / k; the table shows medians, and beside them the least, because other programs on the
// machine only ever add time; then `direct` in per cent of `heap`. Sizes count as in nccl-tests:
// the tensor of all_reduce and broadcast, the output of all_gather, the input of the others.
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "group.h"
#include "kernels.h"

namespace dure {
namespace {

constexpr double kSampleSeconds = 0.005;

struct Shared {
    alignas(128) std::atomic<int> arrived;
    alignas(128) std::atomic<int> phase;
    alignas(128) double took[kMaxRanks];
    uint64_t place[kMaxRanks];  // of the ranks' tensors in the symmetric heap
};

struct Setting {
    Group& group;
    Shared& shared;
    std::string op;
    size_t bytes;
};

// ---- the prototype ------------------------------------------------------------------------------

void barrier(const Setting& s) {
    const int phase = s.shared.phase.load();
    if (s.shared.arrived.fetch_add(1) + 1 == s.group.size()) {
        s.shared.arrived.store(0);
        s.shared.phase.store(phase + 1);
        return;
    }
    const int spins =
        s.group.size() > static_cast<int>(std::thread::hardware_concurrency()) ? 100 : 2000;
    for (int i = 0; s.shared.phase.load() == phase; i++) {
        i > spins ? void(sched_yield()) : relax();
    }
}

__attribute__((target_clones("avx512f", "avx2", "default"))) void add(float* sum, const float* x,
                                                                      size_t n) {
    for (size_t i = 0; i < n; i++) sum[i] += x[i];
}

void direct(const Setting& s) {
    constexpr size_t kBlock = 4096;
    const auto n = static_cast<size_t>(s.group.size()), me = static_cast<size_t>(s.group.rank());
    const size_t count = s.bytes / 4, per = round_up((count + n - 1) / n, 16);
    const size_t end = std::min((me + 1) * per, count);
    alignas(64) float sum[kBlock];
    auto tensor = [&](size_t r) { return reinterpret_cast<float*>(s.group.at(s.shared.place[r])); };
    barrier(s);
    for (size_t at = std::min(me * per, count); at < end; at += kBlock) {
        const size_t length = std::min(kBlock, end - at);
        std::memcpy(sum, tensor(0) + at, length * 4);
        for (size_t r = 1; r < n; r++) add(sum, tensor(r) + at, length);
        for (size_t r = 0; r < n; r++) std::memcpy(tensor(r) + at, sum, length * 4);
    }
    barrier(s);
}

// ---- the engine ---------------------------------------------------------------------------------

// Memory that is there: every page has been touched.
std::byte* ordinary(size_t bytes) {
    auto* data = static_cast<std::byte*>(std::aligned_alloc(64, round_up(bytes, 64)));
    std::memset(data, 0, bytes);
    return data;
}

std::vector<Block> parts_of(std::byte* data, size_t bytes, int n) {
    std::vector<Block> out;
    const size_t part = bytes / static_cast<size_t>(n);
    for (int r = 0; r < n; r++) out.push_back({data + static_cast<size_t>(r) * part, part});
    return out;
}

Call call_of(const Setting& s, std::byte* x, std::byte* y) {
    const int n = s.group.size();
    const size_t part = s.bytes / static_cast<size_t>(n);
    Call call;
    call.dtype = DType::f32;
    if (s.op == "barrier") {
        call.op = Op::barrier;
        call.outputs = {{x, 0}};
    } else if (s.op == "all_reduce" || s.op == "all_reduce_bf16") {
        if (s.op != "all_reduce") call.dtype = DType::bf16;
        call.op = Op::all_reduce;
        call.reduction = Reduction::sum;
        call.outputs = {{x, s.bytes}};
    } else if (s.op == "broadcast") {
        call.op = Op::broadcast;
        call.root = 0;
        call.outputs = {{x, s.bytes}};
    } else if (s.op == "all_gather") {
        call.op = Op::all_gather;
        call.inputs = {{x, part}};
        call.outputs = parts_of(y, s.bytes, n);
    } else if (s.op == "reduce_scatter") {
        call.op = Op::reduce_scatter;
        call.reduction = Reduction::sum;
        call.inputs = parts_of(x, s.bytes, n);
        call.outputs = {{y, part}};
    } else {
        call.op = Op::all_to_all;
        call.inputs = parts_of(x, s.bytes, n);
        call.outputs = parts_of(y, s.bytes, n);
    }
    return call;
}

void run(const Setting& s, Call& call) {
    if (call.op == Op::broadcast) call.root = (call.root + 1) % s.group.size();
    const Block tensor = call.outputs[0];
    const Status status = call.op == Op::all_reduce
                              ? s.group.all_reduce(tensor, call.dtype, call.reduction)
                              : s.group.run(call);
    if (status != Status::ok) {
        std::fprintf(stderr, "rank %d: %s failed\n", s.group.rank(), s.op.c_str());
        std::_Exit(1);
    }
}

// ---- measuring ----------------------------------------------------------------------------------

double sample(const Setting& s, const std::function<void()>& operation, int k) {
    barrier(s);
    const int64_t began = now_ns();
    for (int i = 0; i < k; i++) operation();
    s.shared.took[s.group.rank()] = static_cast<double>(now_ns() - began) * 1e-9;
    barrier(s);
    const double slowest = *std::max_element(s.shared.took, s.shared.took + s.group.size());
    barrier(s);
    return slowest / k;
}

double median(std::vector<double> all) {
    std::sort(all.begin(), all.end());
    return all[all.size() / 2];
}

void compare(const Setting& s, int samples) {
    std::byte *x = ordinary(s.bytes), *y = ordinary(s.bytes);
    auto in = s.group.heap().allocate(s.bytes, true), out = s.group.heap().allocate(s.bytes, true);
    if (!in || !out) std::_Exit(1);
    s.shared.place[s.group.rank()] = s.group.find_in_heap(in->data, s.bytes);
    barrier(s);
    Call plain = call_of(s, x, y), heap = call_of(s, in->data, out->data);
    std::vector<std::function<void()>> contestants{[&] { run(s, plain); }, [&] { run(s, heap); }};
    if (s.op == "all_reduce") contestants.push_back([&] { direct(s); });
    std::vector<std::vector<double>> times(contestants.size());
    std::vector<int> repeats;
    for (auto& contestant : contestants) {
        sample(s, contestant, 1);
        const double once = sample(s, contestant, 2);
        repeats.push_back(std::clamp(static_cast<int>(kSampleSeconds / once), 1, 100'000));
    }
    for (int i = 0; i < samples; i++) {
        for (size_t c = 0; c < contestants.size(); c++) {
            times[c].push_back(sample(s, contestants[c], repeats[c]));
        }
    }
    if (s.group.rank() == 0) {
        std::printf("%-16s %10zu", s.op.c_str(), s.bytes);
        for (auto& t : times) {
            std::printf(" %10.2f %10.2f", median(t) * 1e6,
                        *std::min_element(t.begin(), t.end()) * 1e6);
        }
        if (times.size() > 2) std::printf("   %3.0f %%", 100 * median(times[2]) / median(times[1]));
        std::printf("\n");
        std::fflush(stdout);
    }
    std::free(x);
    std::free(y);
}

struct Wanted {
    int samples;
    std::vector<std::string> ops;
    std::vector<size_t> sizes;
};

void measure(Group& group, Shared& shared, const Wanted& wanted) {
    if (group.rank() == 0) {
        std::printf("%d ranks, kernels %s, us\n%-16s %10s %10s %10s %10s %10s %10s %10s\n",
                    group.size(), kernel_isa(), "operation", "bytes", "plain", "(least)", "heap",
                    "(least)", "direct", "(least)");
    }
    for (const std::string& op : wanted.ops) {
        for (size_t bytes : wanted.sizes) compare({group, shared, op, bytes}, wanted.samples);
    }
}

int start(int n, const Wanted& wanted) {
    constexpr uint64_t kNonce = 1;
    void* memory =
        mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    auto* shared = new (memory) Shared{};
    const auto cores = static_cast<int>(std::thread::hardware_concurrency());
    auto first = Group::create({0, n, 60'000'000'000, cores, kLearnCopies, true}, kNonce);
    const int parent = getpid();
    std::vector<pid_t> children;
    for (int r = 1; r < n; r++) {
        const pid_t pid = fork();
        if (pid == 0) {
            auto group = Group::attach({r, n, 60'000'000'000, cores, kLearnCopies, true}, parent,
                                       first->file(), kNonce);
            while (group->attached() < n) group->wait_attached(1'000'000);
            group->ready();
            measure(*group, *shared, wanted);
            std::_Exit(0);
        }
        children.push_back(pid);
    }
    while (first->attached() < n) first->wait_attached(1'000'000);
    first->ready();
    measure(*first, *shared, wanted);
    for (pid_t pid : children) waitpid(pid, nullptr, 0);
    return 0;
}

}  // namespace
}  // namespace dure

int main(int argc, char** argv) {
    dure::Wanted wanted{argc > 2 ? std::atoi(argv[2]) : 15,
                        {"all_reduce", "all_reduce_bf16", "broadcast", "all_gather",
                         "reduce_scatter", "all_to_all"},
                        {8, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20}};
    if (argc > 3 && std::string(argv[3]) != "all") wanted.ops = {argv[3]};
    if (argc > 4) wanted.sizes.clear();
    for (int i = 4; i < argc; i++) wanted.sizes.push_back(std::strtoull(argv[i], nullptr, 10));
    return dure::start(argc > 1 ? std::atoi(argv[1]) : 2, wanted);
}
