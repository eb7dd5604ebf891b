// The vocabulary of the core: what is called, on which memory, and how it ended.
//
// The core knows addresses, byte counts, dtype codes and ranks; nothing of Python, nothing of
// torch. The numeric codes of `DType`, `Reduction` and `Op` cross the language border and the
// shared segment, so their order is part of the protocol (kProtocol in layout.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace dure {

enum class DType : uint8_t {
    f64,
    f32,
    f16,
    bf16,
    e4m3fn,
    e5m2,
    e4m3fnuz,
    e5m2fnuz,
    e8m0fnu,
    i8,
    i16,
    i32,
    i64,
    u8,
    u16,
    u32,
    u64,
    boolean,
    c32,
    c64,
    c128,
    opaque,  // moves, does not reduce; codes above it name further such types
};
constexpr int kReducibleDTypes = static_cast<int>(DType::opaque);

enum class Reduction : uint8_t {
    sum,
    avg,
    product,
    min,
    max,
    band,
    bor,
    bxor,
    none,
    premul_sum,  // each rank's elements times its `Call::factor`
};
constexpr int kReductions = static_cast<int>(Reduction::premul_sum) + 1;

enum class Op : uint8_t {
    none,
    barrier,
    broadcast,
    all_reduce,
    reduce,
    all_gather,
    gather,
    scatter,
    reduce_scatter,
    all_to_all,
    host_shared_empty,
    send,
    recv,
    new_group,
};

// How an operation ended. One enum crosses the border; src/dure/native/status.py gives each
// member its exception.
enum class Status : int {
    ok = 0,
    timeout = 1,      // peers did not arrive in time; the group is broken
    peer_lost = 2,    // a peer's process died
    peer_left = 3,    // a peer closed its group
    desync = 4,       // the ranks did not call the same thing
    aborted = 5,      // this rank closed the group meanwhile
    interrupted = 6,  // a signal's handler raised (Ctrl-C)
    mismatch = 7,     // a message of another length or dtype than its receive; group is fine
    late = 8,         // a point-to-point peer did not answer in time; group is fine
    usage = 9,        // arguments that cannot be
    no_memory = 10,   // some rank could not allocate
    internal = 11,
    forked = 12,   // called in a child of the process that made the group
    nested = 13,   // a signal handler called a collective during another
    outside = 14,  // broken from outside, by who uses the group; `detail` is his to read
    crossed = 15,  // two threads of a rank called at the same time; the group is broken
};

// What is known about a failure. `peer` is the culprit, `reporter` the rank that noticed.
struct Outcome {
    Status status = Status::ok;
    Op op = Op::none;
    int channel = 0;
    uint32_t seq = 0;  // of the collective in its channel
    int peer = -1;
    int reporter = -1;
    double elapsed_s = 0;
    std::vector<int> missing;
    std::vector<std::string> calls;  // by rank, of a desync
    std::string detail;
};

// A piece of user memory.
struct Block {
    std::byte* data = nullptr;
    size_t bytes = 0;
};

// Where in the user's program a call was made. Sites live as long as the process.
struct Site {
    std::string text;  // "train.py:31 in step"
    std::string file;
    std::string function;
    int line = 0;
};

// What a collective is about beyond lengths, as the program says it: "float32[8, 4] (S(0)) to (R)".
// Ranks compare the code, and show the text, which lives as long as the process.
struct Subject {
    uint32_t code = 0;  // below 2^30; 0 where nothing is said
    const std::string* text = nullptr;
};

// Set in `Call::members` where it is a digest: more than one group, or ranks above 62.
constexpr uint64_t kDigest = uint64_t{1} << 63;

// How every block of a list lies in memory: in `count` runs of equal length, which begin `step`
// bytes apart; a block's address is that of its first run, its length that of all runs together.
struct Runs {
    size_t count = 1;
    size_t step = 0;

    bool apart() const { return count > 1; }
};

// One collective call. Which of the lists is used depends on `op`:
// broadcast, reduce: outputs[0] (in place); all_reduce: outputs[0], and inputs[0] unless in place;
// all_gather, gather: inputs[0], outputs[n]; scatter, reduce_scatter: inputs[n], outputs[0];
// all_to_all: both n; barrier, new_group: none.
struct Call {
    Op op = Op::none;
    DType dtype = DType::opaque;
    Reduction reduction = Reduction::none;
    int root = -1;
    std::vector<Block> inputs;
    std::vector<Block> outputs;
    Runs given = {};  // of the inputs of all_to_all and scatter;
    Runs taken = {};  // of the outputs of all_to_all. All other blocks lie in one run.
    const Site* site = nullptr;
    double factor = 1;           // of a premultiplied sum; may differ between ranks
    DType into = DType::opaque;  // dtype of a reduce_scatter's result; opaque: the same
    uint64_t members = 0;        // of new_group: a bit for each rank, or with bit 63 a digest
    const std::string* thread = nullptr;  // the caller's, by name; lives as long as the process
    Subject subject = {};

    bool converts() const { return into != DType::opaque && into != dtype; }
    DType result() const { return converts() ? into : dtype; }
    // Of all blocks, read or written.
    size_t bytes_touched() const {
        size_t bytes = 0;
        for (const Block& block : inputs) bytes += block.bytes;
        for (const Block& block : outputs) bytes += block.bytes;
        return bytes;
    }
};

size_t item_bytes(DType dtype);
const char* name_of(DType dtype);
const char* name_of(Reduction reduction);
const char* name_of(Op op);

// How many bytes of UTF-8 `text` fit into `most` without a part of a character at their end.
size_t whole_characters(const std::string& text, size_t most);

}  // namespace dure
