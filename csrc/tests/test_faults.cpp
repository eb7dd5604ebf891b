// What goes wrong between ranks: death, silence, leaving, and calls that do not match.
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include "harness.h"
#include "mailbox.h"

namespace dure {
namespace {

using namespace dure::testing;

double seconds_since(int64_t began) { return static_cast<double>(now_ns() - began) * 1e-9; }

TEST(a_killed_rank_is_lost_on_every_survivor_at_once) {
    for (size_t count : {size_t{1}, size_t{1} << 20}) {
        on_processes(3, [count](Group& g) {
            std::vector<float> x(count, 1.0f);
            for (int k = 0; k < 3; k++) {
                CHECK(g.all_reduce(block_of(x), DType::f32, Reduction::sum) == Status::ok);
            }
            if (g.rank() == 2) raise(SIGKILL);
            const int64_t began = now_ns();
            CHECK(g.all_reduce(block_of(x), DType::f32, Reduction::sum) == Status::peer_lost);
            CHECK(seconds_since(began) < 2);
            CHECK(g.failure().peer == 2);
            CHECK(g.run({Op::barrier}) == Status::peer_lost);
        });
    }
}

// What the kernel takes apart at the end of a process: it takes long after the death is known.
TEST(a_killed_rank_is_lost_before_its_memory_is_gone) {
    auto* died = static_cast<std::atomic<int64_t>*>(
        mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    on_processes(2, [died](Group& g) {
        std::vector<char> ballast(g.rank() == 1 ? size_t{256} << 20 : 1, 'x');
        CHECK(g.run({Op::barrier}) == Status::ok);
        if (g.rank() == 1) {
            died->store(now_ns());
            raise(SIGKILL);
        }
        CHECK(g.run({Op::barrier}) == Status::peer_lost);
        CHECK(seconds_since(died->load()) < 0.1);
        CHECK(g.failure().detail == "signal 9 (SIGKILL)");
        CHECK(ballast.size() == 1);
    });
    munmap(died, 4096);
}

TEST(a_rank_is_watched_from_ready_to_close) {
    on_processes(2, [](Group& g) {
        CHECK(g.run({Op::barrier}) == Status::ok);
        const ProcessPage& mine = g.heap().page();
        for (int i = 0; i < 1000 && mine.life.load() == 0; i++) usleep(1000);
        CHECK(mine.life.load() != 0);
        CHECK(!g.lost(1 - g.rank()));
        CHECK(g.run({Op::barrier}) == Status::ok);
        g.close();
        CHECK(mine.life.load() == 0);
    });
}

TEST(a_missing_rank_is_asked_where_it_is) {
    std::atomic<bool> over{false};
    on_threads(
        3,
        [&over](Group& g) {
            std::vector<float> x(4, 1.0f);
            CHECK(g.all_reduce(block_of(x), DType::f32, Reduction::sum) == Status::ok);
            if (g.rank() == 1) {
                while (!over) usleep(1000);
                return;
            }
            CHECK(g.run({Op::barrier}) == Status::timeout);
            const Outcome out = g.failure();
            CHECK(out.missing == std::vector<int>{1});
            CHECK(out.calls.size() == 1);
            CHECK(out.calls[0].find("all_reduce #1") != std::string::npos);
            CHECK(out.calls[0].find("now at rank 1's place") != std::string::npos);
            over = true;
        },
        0.05,
        [](Group& g) {
            const int rank = g.rank();
            g.set_where([rank] { return "rank " + std::to_string(rank) + "'s place"; });
        });
}

TEST(an_answer_ends_with_a_whole_character) {
    const Watched watched([] {
        std::string text;
        for (size_t i = 0; i < kAnswerBytes; i++) text += "\xea\xb0\x80";  // of three bytes
        return text;
    });
    const SymmetricHeap& heap = SymmetricHeap::of_process();
    const auto self = Process::of(getpid(), heap.page().start_time, heap.file());
    const uint32_t question = self->ask(watched.place());
    const std::string answer = self->await_answer(question, now_ns() + 20'000'000'000);
    CHECK(answer.size() > kAnswerBytes - 4 && answer.size() % 3 == 0);
}

// A process whose heap is ready, until it is killed.
pid_t start_peer(int* heap_file) {
    int ready[2];
    CHECK(pipe(ready) == 0);
    const pid_t child = fork();
    if (child == 0) {
        const int fd = SymmetricHeap::of_process().file();
        CHECK(write(ready[1], &fd, sizeof fd) == sizeof fd);
        for (;;) pause();
    }
    CHECK(read(ready[0], heap_file, sizeof *heap_file) == sizeof *heap_file);
    close(ready[0]);
    close(ready[1]);
    return child;
}

TEST(a_peer_is_not_lost_because_no_descriptor_is_left) {
    int heap_file = -1;
    const pid_t child = start_peer(&heap_file);
    const uint64_t started = start_time_of(child);
    const int last = dup(0);
    rlimit before{};
    CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
    close(last);
    // Enough to map the heap, not to keep a descriptor of the process when another takes its place.
    const rlimit few{static_cast<rlim_t>(last) + 1, before.rlim_max};
    CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
    auto peer = Process::of(child, started, heap_file);
    CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
    CHECK(peer != nullptr && !peer->dead());
    CHECK(Process::of(child, started, heap_file) == peer);         // one for the process
    CHECK(Process::of(child, started + 1, heap_file) == nullptr);  // a later one with that number
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    CHECK(peer->dead());
    peer.reset();
    CHECK(Process::of(child, started, heap_file) == nullptr);
}

TEST(an_abort_record_is_waited_for_while_its_writer_lives) {
    on_processes(2, [](Group& g) {
        AbortRecord& record = g.header().abort_record;
        CHECK(g.run({Op::barrier}) == Status::ok);
        if (g.rank() == 1) {
            record.phase = kWriting + 1;
            usleep(100'000);  // as one that was kept from its core
            record.status = Status::timeout;
            record.peer = 1;
            record.phase = kReadable;
        }
        CHECK(g.run({Op::barrier}) == Status::timeout);
    });
    on_processes(2, [](Group& g) {
        CHECK(g.run({Op::barrier}) == Status::ok);
        if (g.rank() == 1) {
            g.header().abort_record.phase = kWriting + 1;
            raise(SIGKILL);
        }
        CHECK(g.run({Op::barrier}) == Status::peer_lost);
        CHECK(g.failure().peer == 1);
    });
}

TEST(a_group_tells_how_it_is_while_an_abort_record_is_waited_for) {
    on_threads(2, [](Group& g) {
        AbortRecord& record = g.header().abort_record;
        CHECK(g.run({Op::barrier}) == Status::ok);
        if (g.rank() == 0) {
            record.phase = kWriting + 1;
            std::thread waiting([&] { CHECK(g.run({Op::barrier}) == Status::timeout); });
            for (int i = 0; i < 50; i++) {
                CHECK(g.failure().status == Status::ok);
                usleep(1000);
            }
            record.status = Status::timeout;
            record.peer = 1;
            record.phase = kReadable;
            waiting.join();
        } else {
            while (record.phase != kReadable) usleep(100);
        }
        CHECK(g.run({Op::barrier}) == Status::timeout);
    });
}

// A writer that is stopped too long, and goes on when others have given up: all hear the same, and
// name the writer.
TEST(ranks_agree_on_the_outcome_of_a_writer_that_was_given_up) {
    on_processes(3, [](Group& g) {
        AbortRecord& record = g.header().abort_record;
        CHECK(g.run({Op::barrier}) == Status::ok);
        if (g.rank() == 1) {
            record.phase = kWriting + 1;
            while (record.phase == kWriting + 1) usleep(1000);
            CHECK(record.phase == kGivenUp + 1);
        }
        CHECK(g.run({Op::barrier}) == Status::peer_lost);
        CHECK(g.failure().peer == 1);
        CHECK(g.rank() == 1 || !g.failure().detail.empty());
    });
    // The writer itself, in the middle of `abort`, finds that it was given up.
    on_threads(2, [](Group& g) {
        Word& phase = g.header().abort_record.phase;
        CHECK(g.run({Op::barrier}) == Status::ok);
        if (g.rank() == 0) {
            phase = kGivenUp + 1;
        } else {
            while (phase == 0) usleep(100);
            Outcome out;
            out.status = Status::timeout;
            CHECK(g.abort(out) == Status::peer_lost);
        }
        CHECK(g.run({Op::barrier}) == Status::peer_lost);
        CHECK(g.failure().peer == 1);
    });
}

TEST(a_stopped_rank_is_named_at_the_timeout) {
    pid_t stopped = 0;
    std::vector<int> statuses = on_processes(
        3,
        [&stopped](Group& g) {
            std::vector<float> x(100, 1.0f);
            CHECK(g.all_reduce(block_of(x), DType::f32, Reduction::sum) == Status::ok);
            if (g.rank() == 1) raise(SIGSTOP);
            Status s = g.all_reduce(block_of(x), DType::f32, Reduction::sum);
            CHECK(s == Status::timeout);
            CHECK(g.failure().missing == std::vector<int>{1});
            CHECK(g.failure().calls.at(0).find("stopped") != std::string::npos);
            if (g.rank() == 0) {
                stopped = g.pid_of(1);
                kill(stopped, SIGCONT);
            }
        },
        0.4);
    for (int status : statuses) CHECK(status == 0);
}

TEST(a_rank_that_left_is_named) {
    on_threads(3, [](Group& g) {
        if (g.rank() == 1) return g.close();
        std::vector<float> x(100, 1.0f);
        CHECK(g.all_reduce(block_of(x), DType::f32, Reduction::sum) == Status::peer_left);
        CHECK(g.failure().peer == 1);
    });
}

TEST(leaving_after_the_last_call_disturbs_nobody) {
    for (int round = 0; round < 50; round++) {
        on_threads(3, [](Group& g) {
            std::vector<float> x(300'000, 1.0f);
            CHECK(g.all_reduce(block_of(x), DType::f32, Reduction::sum) == Status::ok);
            g.close();
            CHECK(x.front() == 3.0f && x.back() == 3.0f);
        });
    }
}

// Rank 1 makes another call than rank 0; both must be told, and keep their data.
void expect_desync(const std::function<Call(Block, bool)>& call) {
    on_threads(2, [&](Group& g) {
        std::vector<float> x(2000, 5.0f);
        const auto before = x;
        CHECK(g.run(call(block_of(x), g.rank() == 1)) == Status::desync);
        CHECK(x == before);
        const Outcome out = g.failure();
        CHECK(out.calls.size() == 2 && out.calls[0] != out.calls[1]);
        CHECK(out.seq == 1);
    });
}

TEST(making_a_group_is_compared_like_any_call) {
    auto make = [](uint64_t members) {
        Call call;
        call.op = Op::new_group;
        call.members = members;
        return call;
    };
    on_threads(2, [&](Group& g) {
        CHECK(g.run(make(0b101)) == Status::ok);
        CHECK(g.run(make(g.rank() == 0 ? 0b101 : kDigest | 0xabc)) == Status::desync);
        const Outcome out = g.failure();
        CHECK(out.calls[0] == "new_group([0, 2])" && out.calls[1] == "new_group(ranks #abc)");
    });
    on_threads(2, [&](Group& g) {
        Call barrier;
        barrier.op = Op::barrier;
        CHECK(g.run(g.rank() == 0 ? make(0b11) : barrier) == Status::desync);
        CHECK(g.failure().calls[0] == "new_group([0, 1])");
    });
}

TEST(calls_that_differ_are_told_to_all_before_data_change) {
    expect_desync([](Block b, bool odd) {
        return Call{odd ? Op::broadcast : Op::all_reduce,
                    DType::f32,
                    odd ? Reduction::none : Reduction::sum,
                    odd ? 0 : -1,
                    {},
                    {b}};
    });
    expect_desync([](Block b, bool odd) {
        b.bytes = odd ? 4000 : 8000;
        return Call{Op::all_reduce, DType::f32, Reduction::sum, -1, {}, {b}};
    });
    expect_desync([](Block b, bool odd) {
        return Call{Op::all_reduce, odd ? DType::i32 : DType::f32, Reduction::sum, -1, {}, {b}};
    });
    expect_desync([](Block b, bool odd) {
        return Call{Op::all_reduce, DType::f32, odd ? Reduction::max : Reduction::sum, -1, {}, {b}};
    });
    expect_desync([](Block b, bool odd) {
        return Call{Op::broadcast, DType::f32, Reduction::none, odd ? 1 : 0, {}, {b}};
    });
}

TEST(calls_about_other_things_are_told_to_all) {
    static const std::string texts[] = {"rows", "columns"};
    const auto about = [](Block b, size_t thing) {
        Call call{Op::all_reduce, DType::f32, Reduction::sum, -1, {}, {b}};
        call.subject = {thing ? (uint32_t{1} << 30) - 1 : 1, &texts[thing]};
        return call;
    };
    expect_desync([&](Block b, bool odd) { return about(b, odd); });
    expect_desync([&](Block b, bool odd) {
        Call call = about(b, 1);
        if (odd) call.subject = {};
        return call;
    });
    on_threads(2, [&](Group& g) {
        std::vector<float> x(2000, 1.0f);
        for (size_t thing : {0, 1, 1, 0}) CHECK(g.run(about(block_of(x), thing)) == Status::ok);
        CHECK(x[0] == 16.0f);
        CHECK(g.run(about(block_of(x), g.rank() ? 1 : 0)) == Status::desync);
        CHECK(g.failure().calls[0] == "all_reduce(float32[2000], SUM), of rows");
        CHECK(g.failure().calls[1] == "all_reduce(float32[2000], SUM), of columns");
    });
}

TEST(blocks_that_do_not_match_are_told_to_all) {
    expect_desync([](Block b, bool odd) {
        // Rank 1 sends 12 bytes to rank 0, which expects 8.
        const Block first{b.data, 8}, second{b.data + 100, odd ? size_t{12} : size_t{8}};
        Call call{Op::all_to_all, DType::f32, Reduction::none, -1, {first, first}, {first, first}};
        if (odd) call.inputs[0] = second;
        return call;
    });
}

}  // namespace
}  // namespace dure
