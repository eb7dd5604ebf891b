// Random sequences of all operations, at random sizes, in the symmetric heap and out of it, one
// directly after the other: whoever fills a buffer too soon, or reads one too late, gets wrong
// numbers.
#include <algorithm>
#include <random>

#include "harness.h"
#include "mailbox.h"

namespace dure {
namespace {

using namespace dure::testing;

using Number = uint32_t;  // sums wrap around as the engine's int32 does

constexpr size_t kRoom = 500'000;  // elements: several chunks, many rounds
constexpr size_t kShift = 64;      // how far into its room a tensor may begin
constexpr int kOperations = 120;

// Element `i` of what rank `from` has for rank `to` in operation `k`.
Number value(Number k, size_t from, size_t to, size_t i) {
    return k * 7919 + static_cast<Number>(from * 104'729 + to * 1'299'709 + i * 31);
}

// What all of `n` ranks have for `to`, added up.
Number sum(Number k, size_t n, size_t to, size_t i) {
    Number all = 0;
    for (size_t from = 0; from < n; from++) all += value(k, from, to, i);
    return all;
}

// One rank. What all ranks must choose alike comes from `common_`, the rest from `own_`.
class Player {
  public:
    Player(Group& group, uint32_t seed)
        : group_(group),
          box_(group),
          n_(static_cast<size_t>(group.size())),
          me_(static_cast<size_t>(group.rank())),
          common_(seed),
          own_(seed + 1000 * static_cast<uint32_t>(me_ + 1)) {
        for (Room& room : rooms_) {
            room.own.resize(kRoom);
            renew(room);
        }
    }
    ~Player() {
        group_.close();
        box_.stop();
    }

    void play(Number k) {
        k_ = k;
        const size_t op = choose(11);
        count_ = choose_count(op < 3 ? kRoom - kShift : (kRoom - kShift) / n_ - 4);
        uneven_ = choose(2) == 1;
        root_ = choose(n_);
        in_place_ = choose(2) == 1;
        const size_t way = choose(3), shift = choose(kShift);
        for (Room& room : rooms_) {
            const bool shared = way == 0 || (way == 1 && own_() % 2 == 0);
            room.at = (shared ? reinterpret_cast<Number*>(room.shared->data) : room.own.data());
            room.at += shift;
        }
        switch (op) {
            case 0:
                return reduce(Op::all_reduce);
            case 1:
                return reduce(Op::reduce);
            case 2:
                return broadcast();
            case 3:
                return gather(Op::all_gather);
            case 4:
                return gather(Op::gather);
            case 5:
                return scatter();
            case 6:
                return reduce_scatter();
            case 7:
                return all_to_all();
            case 8:
                return pass_on();
            case 9:
                CHECK(group_.run({Op::barrier}) == Status::ok);
                return;
            default:
                if (choose(4) == 0) renew(rooms_[choose(2)]);
        }
    }

  private:
    struct Room {
        std::shared_ptr<HeapMemory> shared;
        std::vector<Number> own;
        Number* at = nullptr;
    };

    size_t choose(size_t n) { return common_() % n; }
    size_t choose_count(size_t most) {
        constexpr size_t kChunk = kSmallChunkBytes / sizeof(Number);
        constexpr size_t kEdges[] = {8, 9, 4096, 4097, kChunk - 1, kChunk, kChunk + 1, 2 * kChunk};
        const size_t counts[] = {choose(12), choose(5000), kEdges[choose(std::size(kEdges))],
                                 choose(most + 1)};
        return std::min(counts[choose(4)], most);
    }
    size_t length(size_t from, size_t to) const {
        return uneven_ ? count_ + (3 * from + to) % 4 : count_;
    }
    void renew(Room& room) {
        room.shared = group_.heap().allocate(kRoom * sizeof(Number), false);
        CHECK(room.shared != nullptr);
    }

    static Block block(Number* at, size_t count) {
        return {reinterpret_cast<std::byte*>(at), count * sizeof(Number)};
    }
    static Number* numbers(Block b) { return reinterpret_cast<Number*>(b.data); }
    // Blocks one after the other; `count_of` tells how long each is.
    std::vector<Block> blocks(Number* at, const auto& count_of) const {
        std::vector<Block> out;
        for (size_t r = 0; r < n_; at += count_of(r++)) out.push_back(block(at, count_of(r)));
        return out;
    }
    void fill(Block b, size_t from, size_t to) const {
        for (size_t i = 0; i < b.bytes / sizeof(Number); i++) {
            numbers(b)[i] = value(k_, from, to, i);
        }
    }
    void expect(Block b, size_t from, size_t to) const {
        for (size_t i = 0; i < b.bytes / sizeof(Number); i++) {
            CHECK(numbers(b)[i] == value(k_, from, to, i));
        }
    }
    void expect_sum(Block b, size_t to) const {
        for (size_t i = 0; i < b.bytes / sizeof(Number); i++) {
            CHECK(numbers(b)[i] == sum(k_, n_, to, i));
        }
    }
    void run(Op op, Reduction reduction, bool rooted, std::vector<Block> in,
             std::vector<Block> out) {
        Call call{op, DType::i32, reduction, rooted ? static_cast<int>(root_) : -1, {}, {}};
        call.inputs = std::move(in);
        call.outputs = std::move(out);
        CHECK(group_.run(call) == Status::ok);
    }

    void reduce(Op op) {
        const Block x = block(rooms_[0].at, count_);
        fill(x, me_, 0);
        run(op, Reduction::sum, op == Op::reduce, {}, {x});
        op == Op::all_reduce || me_ == root_ ? expect_sum(x, 0) : expect(x, me_, 0);
    }
    void broadcast() {
        const Block x = block(rooms_[0].at, count_);
        fill(x, me_, 0);
        run(Op::broadcast, Reduction::none, true, {}, {x});
        expect(x, root_, 0);
    }
    void gather(Op op) {
        const bool rooted = op == Op::gather;
        std::vector<Block> out = blocks(rooms_[1].at, [this](size_t r) { return length(r, 0); });
        const bool has_out = !rooted || me_ == root_;
        const Block x = in_place_ && has_out ? out[me_] : block(rooms_[0].at, length(me_, 0));
        fill(x, me_, 0);
        if (!has_out) out.clear();
        run(op, Reduction::none, rooted, {x}, out);
        for (size_t r = 0; r < out.size(); r++) expect(out[r], r, 0);
    }
    void scatter() {
        std::vector<Block> in;
        if (me_ == root_) {
            in = blocks(rooms_[0].at, [this](size_t r) { return length(root_, r); });
            for (size_t r = 0; r < n_; r++) fill(in[r], me_, r);
        }
        const Block x = block(rooms_[1].at, length(root_, me_));
        run(Op::scatter, Reduction::none, true, in, {x});
        expect(x, root_, me_);
    }
    void reduce_scatter() {
        const auto in = blocks(rooms_[0].at, [this](size_t r) { return length(0, r); });
        for (size_t r = 0; r < n_; r++) fill(in[r], me_, r);
        const Block x = in_place_ ? in[me_] : block(rooms_[1].at, length(0, me_));
        run(Op::reduce_scatter, Reduction::sum, false, in, {x});
        expect_sum(x, me_);
    }
    void all_to_all() {
        if (in_place_) uneven_ = false;
        const auto in = blocks(rooms_[0].at, [this](size_t r) { return length(me_, r); });
        const auto out =
            in_place_ ? in : blocks(rooms_[1].at, [this](size_t r) { return length(r, me_); });
        for (size_t r = 0; r < n_; r++) fill(in[r], me_, r);
        run(Op::all_to_all, Reduction::none, false, in, out);
        for (size_t r = 0; r < n_; r++) expect(out[r], r, me_);
    }
    // A message to the next rank, one from the rank before.
    void pass_on() {
        const size_t next = (me_ + 1) % n_, before = (me_ + n_ - 1) % n_;
        const Block mine = block(rooms_[0].at, length(me_, 0));
        const Block got = block(rooms_[1].at, length(before, 0));
        fill(mine, me_, 0);
        const auto sent = box_.start_send(mine, DType::i32, static_cast<int>(next), 0);
        int source = -1;
        const auto from = static_cast<int>(before);
        CHECK(box_.receive(got, DType::i32, from, 0, &source).status == Status::ok);
        expect(got, before, 0);
        CHECK(sent->wait(20'000'000'000) && sent->outcome().status == Status::ok);
    }

    Group& group_;
    Mailbox box_;
    const size_t n_, me_;
    std::mt19937 common_, own_;
    Room rooms_[2];
    Number k_ = 0;
    size_t count_ = 0, root_ = 0;
    bool uneven_ = false, in_place_ = false;
};

// `cores` decides how much of a staging buffer is used at a time.
void play_on(int n, int cores) {
    std::vector<std::unique_ptr<Group>> groups;
    Options options = options_of(0, n);
    options.cores = cores;
    groups.push_back(Group::create(options, kNonce));
    for (int r = 1; r < n; r++) groups.push_back(Group::join(options_of(r, n), *groups[0]));
    std::vector<std::thread> threads;
    for (auto& group : groups) {
        threads.emplace_back([&group, n, cores] {
            group->ready();
            Player player(*group, static_cast<uint32_t>(10 * n + cores));
            for (int k = 0; k < kOperations; k++) player.play(static_cast<Number>(k));
            CHECK(group->run({Op::barrier}) == Status::ok);
        });
    }
    for (std::thread& t : threads) t.join();
}

TEST(operations_follow_each_other_in_small_chunks) {
    single_copies = kNoSingleCopies;
    for (int n : {1, 2, 3, 4, 5, 8}) play_on(n, n);
}

TEST(operations_follow_each_other_in_large_chunks) {
    single_copies = kNoSingleCopies;
    for (int n : {2, 3, 8}) play_on(n, 1);
}

TEST(operations_follow_each_other_staged_and_copied_once) {
    single_copies = 20'000;
    for (int n : {2, 3, 8}) play_on(n, n);
}

}  // namespace
}  // namespace dure
