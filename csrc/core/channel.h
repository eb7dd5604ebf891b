// A channel of a group: collectives in one order, with slots, staging and a thread of their own.
//
// Note "Order of calls". A group has two channels, which match independently of each other: what is
// called on one does not wait for what is called on the other. Within a channel operations run in
// the order of their calls, from whatever thread they come. A call takes its number (`Turn`) at
// once, and that is all there is to its place: an operation runs when `served_` has reached its
// number, on its caller's thread, or, if it is asynchronous, on that of whoever waits, or on the
// channel's progress thread (call_queue.h).
//
// Ranks do not agree on an order. If several threads of a program call on one channel, it is for
// the program to call in the same order on all ranks; if it does not, the fingerprints differ
// and the calls end as a desync, or the threads are found to have no order (threads.cpp). Threads
// that need no order between them use two channels.
//
// Threads: anything may be called from any thread.
#pragma once

#include <memory>

#include "group.h"
#include "kernels.h"
#include "request.h"

namespace dure {

class CallQueue;

class Channel {
  public:
    Channel(Group& group, int index);
    ~Channel() { stop(); }
    Channel(const Channel&) = delete;
    Channel& operator=(const Channel&) = delete;

    // A call's place in the order. Who has taken one runs its operation, or lets it go: the
    // destructor waits until its turn has come, and passes it on.
    class Turn {
      public:
        explicit Turn(Channel& channel)
            : channel_(&channel), number_(channel.issued_.fetch_add(1)) {}
        Turn(Turn&& other) noexcept : channel_(other.channel_), number_(other.number_) {
            other.channel_ = nullptr;
        }
        Turn& operator=(Turn&&) = delete;
        ~Turn() {
            if (!channel_) return;
            channel_->await_turn(number_);
            channel_->pass_turn(number_);
        }
        // Number of the call on its channel, from 1.
        uint32_t number() const { return number_ + 1; }
        // Numbers wrap.
        bool before(const Turn& other) const {
            return static_cast<int32_t>(number_ - other.number_) < 0;
        }
        bool come() const { return channel_->has_come(number_); }
        void wait() const { channel_->await_turn(number_); }

      private:
        Channel* channel_;
        uint32_t number_;
    };

    // The collectives; see Call for which blocks each one takes. On anything but `ok`, the group's
    // `failure` tells more.
    Status run(const Call& call) { return run(call, Turn(*this)); }
    Status run(const Call& call, Turn turn);
    // The same later, by whoever waits for it or by the progress thread; `brief` where it is over
    // before another thread could begin it.
    std::shared_ptr<Request> start(Call call, bool brief = false) {
        return start(std::move(call), Turn(*this), brief);
    }
    std::shared_ptr<Request> start(Call call, Turn turn, bool brief);
    std::shared_ptr<HeapMemory> host_shared_empty(size_t bytes, Status& status, const Site* site,
                                                  Turn turn);
    // The number of calls that have received a number.
    uint32_t issued() const { return issued_.load(std::memory_order_relaxed); }
    // A barrier before the first call.
    Status join() { return barrier(); }
    // End the progress thread. What has not begun ends with `aborted`. For Group::close, which sees
    // to it that a running operation ends.
    void stop();

  private:
    friend class CallQueue;

    // -- the order of calls (channel.cpp)
    // -----------------------------------------------------------
    bool has_come(uint32_t number) const {
        return served_.load(std::memory_order_acquire) == number;
    }
    void await_turn(uint32_t number);
    void pass_turn(uint32_t number);
    template <typename F>
    bool await_change(F ready);
    void ring();
    Status run_queued(const Call& call, const Turn& turn, bool background);
    template <typename F>
    Status guarded(const Turn& turn, F collective);
    template <typename F>
    Status unless_broken(const Turn& turn, F& collective);

    // -- one large operation at a time (channel.cpp, core_lock.h)
    // ------------------------------------------------------------
    class HeldCore;
    CoreLock* lock_for(const Call& call) const;
    void take_core();
    void give_up_core();

    // -- barriers (barrier.cpp)
    // ----------------------------------------------------------------
    // What a waiting rank remembers between two slices.
    struct Wait {
        int64_t began_ns;
        int64_t asked_ns;
    };
    ChannelBlock& block(int rank) const { return ranks_[rank].channel[index_]; }
    OpSlot& slot(int rank) const { return block(rank).slot[seq_ & 1]; }
    bool arrived(int rank, uint32_t tick) const;
    int first_missing(int r, uint32_t tick) const;
    bool neighbour_missing(int r, uint32_t tick) const;
    void arrive();
    Status await_all() { return await_tick(tick_); }
    Status await_tick(uint32_t tick);
    Status await_missing(int r, uint32_t tick);
    void sleep_for(int rank, uint32_t tick, int64_t ns);
    int64_t patience_ns() const;
    bool rank_waits() const;
    Status barrier() {
        arrive();
        return await_all();
    }
    // As `await_all`, except for the last `lag` arrivals of the others.
    Status await_all_but(uint32_t lag) { return await_tick(tick_ - lag); }

    // -- what a waiting rank looks at (watching.cpp)
    // ---------------------------------------------
    Status examine(Wait& wait, uint32_t tick);
    std::string last_call(int rank) const;

    // -- the header exchange of every collective (fingerprint.cpp)
    // -------------------------------
    void write_header(const Call& call, size_t bytes, uint64_t heap);
    void write_block_header(const Call& call, uint64_t heap);
    void show_place(const Call& call);
    std::string site_of(int rank, size_t slot) const;
    std::string thread_of(int rank, size_t slot) const;
    Status exchange_headers();
    Status check_threads();
    bool ends_by_crossing(uint32_t number) const;
    bool same_call(int rank) const;
    Status check_blocks() const;
    std::string describe_blocks(int rank) const;
    std::string describe_call(int rank) const;
    Status report_desync();
    uint64_t* table(int rank) const;
    size_t send_bytes(int from, int to) const;
    size_t most_bytes() const;
    size_t longest_block(int rank) const;

    // -- the collectives
    // ----------------------------------------------------------------------------
    struct Slices;
    struct Places;
    struct Staged;
    struct Transfer;
    enum class InHeap { none, some, all };  // of the ranks' tensors
    Status collective(const Call& call);
    Status carry_out(const Call& call);
    Status reduce(Block tensor, const Call& call);
    Status reduce_inline(Block tensor, const std::byte* given, int root, ReduceFn kernel);
    Status reduce_one_shot(Block tensor, const std::byte* given, int root, ReduceFn kernel);
    Status reduce_pairwise(const Staged& staged);
    Status reduce_two_shot(const Staged& staged);
    Status reduce_zero_copy(const Staged& staged);
    void combine(ReduceFn kernel, void* const* to, int num_to, const void* const* from,
                 size_t count);
    const double* factors();
    void offer(const Staged& staged, size_t chunk);
    void answer(const Staged& staged, size_t chunk);
    void swap(const Staged& staged, size_t chunk);
    void copy_in(const Staged& staged, size_t chunk);
    void reduce_own_slice(const Staged& staged, size_t chunk);
    void copy_out(const Staged& staged, size_t chunk);
    Status move(const Call& call);
    Status move_staged(const Transfer& transfer);
    Status move_swapped(const Transfer& transfer, size_t rounds);
    Status reduce_scatter_zero_copy(const Transfer& transfer);
    struct Address;
    void tell_address(const Transfer& transfer);
    uint64_t address_of(int rank) const;
    bool failed_to_copy(int rank) const;
    bool fetch(const Transfer& transfer, int peer, Block result) const;
    bool copies_once(const Transfer& transfer, size_t longest) const;
    bool all_readable(const Transfer& transfer) const;
    bool tells_beginning(int rank) const;
    std::atomic<float>* count_way(const Transfer& transfer, InHeap tensors, size_t most);
    void note_time(std::atomic<float>* lasted) const;
    InHeap senders_in_heap(const Transfer& transfer) const;
    void deliver(const Transfer& transfer, int peer, size_t at) const;
    Status move_once(const Transfer& transfer, bool shares);
    Status report_lost(int rank);
    bool inlined(const Transfer& transfer, int sender) const;
    void put(const Transfer& transfer, size_t round);
    std::byte* place(const Transfer& transfer, int sender, size_t round) const;
    const std::byte* source(const Transfer& transfer, int peer, size_t round) const;
    void take(const Transfer& transfer, size_t round);
    uint64_t place_of(const Transfer& transfer) const;
    InHeap in_heap() const;
    std::shared_ptr<HeapMemory> allocate_node_shared(size_t bytes, Status& status,
                                                     const Site* site);

    // The buffer that `rank` uses after the next `ahead` ones.
    std::byte* stage(int rank, size_t ahead = 0) const {
        return staging_ +
               (static_cast<size_t>(rank) * kBuffers + (use_ + ahead) % kStages) * kStageBytes;
    }
    // Where `writer`, one of two ranks, puts the piece that it swaps after the next `ahead` ones.
    std::byte* swap_buffer(int writer, size_t ahead) const {
        const uint64_t number = swapped_ + ahead;
        const size_t home = static_cast<size_t>(writer) ^ (number / kSwaps % 2);
        return staging_ + (home * kBuffers + kStages + number % kSwaps) * kStageBytes;
    }
    void next_stage(size_t used = 1) { use_ += used; }

    Group& group_;
    const int index_, rank_, size_;
    RankBlock* const ranks_;
    std::byte* const staging_;  // of this channel
    std::byte* const tables_;
    const size_t chunk_;  // bytes of a staging buffer that are used

    // Of whose turn it is; the next one's may change them.
    uint32_t seq_ = 0;      // collectives begun
    uint32_t tick_ = 0;     // arrivals made; equal on all ranks at equal places of the program
    uint64_t use_ = 0;      // stages used
    uint64_t swapped_ = 0;  // pieces swapped
    Op op_ = Op::none;
    const Site* shown_[2] = {};                // what `site` of the own block tells
    const std::string* shown_thread_[2] = {};  // `thread`
    uint32_t shown_subject_[2] = {};           // and `subject`, its code
    BlockWays block_ways_;
    int64_t put_ns_ = 0;         // when this rank had put the first pieces of long blocks
    bool all_begun_ = false;     // all ranks' headers have come
    int64_t started_ns_ = 0;     // of the operation's first wait that was not short
    double factors_[kMaxRanks];  // of a premultiplied sum, by rank

    bool background_ = false;   // the progress thread runs it
    CoreLock* core_ = nullptr;  // of a large operation
    bool holds_core_ = false;

    alignas(64) Word issued_{0};  // numbers taken
    Word served_{0};              // whose turn it is
    Word sleepers_{0};            // threads that wait for their turn, or for a call to run
    Word bell_{0};                // rung for them
    std::shared_ptr<CallQueue> queue_;
};

}  // namespace dure
