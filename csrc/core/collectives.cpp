// The doors: what every collective does before and after, and the few that need no file of their
// own.
#include <sys/mman.h>

#include <algorithm>
#include <system_error>

#include "group.h"

namespace dure {

// Run one collective: alone, counted, and not on a broken group.
template <typename F>
Status Group::guarded(F collective) {
    Visit visit(*this);
    if (!visit) return Status::aborted;
    std::unique_lock hold(running_, std::try_to_lock);
    if (!hold) {
        about_to_wait();
        hold.lock();
    }
    if (failed_.load(std::memory_order_acquire)) return failure().status;
    if (broken()) return adopt_verdict();
    return collective();
}

Status Group::all_reduce(Block tensor, DType dtype, Reduction reduction) {
    Call call;
    call.op = Op::all_reduce;
    call.dtype = dtype;
    call.reduction = reduction;
    call.outputs = {tensor};
    return run(call);
}

Status Group::run(const Call& call) {
    return guarded([&] {
        switch (call.op) {
            case Op::barrier:
                announce(call, 0, 0);
                return open();
            case Op::all_reduce:
            case Op::reduce:
                return reduce(call.outputs[0], call);
            case Op::broadcast:
            case Op::all_gather:
            case Op::gather:
            case Op::scatter:
            case Op::reduce_scatter:
            case Op::all_to_all:
                return move(call);
            default:
                return Status::usage;
        }
    });
}

std::shared_ptr<SharedBlock> Group::shared_empty(size_t bytes, Status& status, const Site* site,
                                                 bool common) {
    std::shared_ptr<SharedBlock> made;
    status = guarded([&] {
        Status inner = Status::ok;
        made = allocate(bytes, inner, site, common);
        return inner;
    });
    return status == Status::ok ? made : nullptr;
}

// Note "Making a shared block". Rank 0 makes the file before the opening and says its descriptor in
// its slot (-1: could not); after the opening all map it; at a second meeting each says whether it
// has; after a third nobody needs the descriptor. All ranks fail together.
std::shared_ptr<SharedBlock> Group::allocate(size_t bytes, Status& status, const Site* site,
                                             bool common) {
    const size_t length = round_up(std::max(bytes, size_t{1}), kPage);  // no file of 0 bytes maps
    const size_t num_regions = common ? 1 : static_cast<size_t>(size_);
    MemoryFile file;
    std::shared_ptr<Mapping> mapping;
    Call call;
    call.op = common ? Op::host_shared_empty : Op::shared_empty;
    call.site = site;
    announce(call, bytes, 0);
    int32_t fd = -1;
    if (rank_ == 0) {
        try {
            file = MemoryFile::create("dure-arena", length * num_regions);
            fd = file.fd();
        } catch (const std::system_error&) {
        }
    }
    std::memcpy(slot(rank_).inlined, &fd, sizeof fd);
    if (status = open(); status != Status::ok) return nullptr;
    std::memcpy(&fd, slot(0).inlined, sizeof fd);
    try {
        if (rank_ != 0 && fd >= 0) file = MemoryFile::open_of(block(0).pid, fd);
        if (fd >= 0) mapping = file.map();
    } catch (const std::system_error&) {
    }
    auto made = std::make_shared<SharedBlock>();
    *made = {mapping, arena_.next_id(), bytes, common ? 0 : length, rank_};
    if (mapping && !common) madvise(made->data(), length, MADV_POPULATE_WRITE);
    *reinterpret_cast<int32_t*>(stage(rank_)) = mapping ? 1 : 0;
    if (status = meet(); status != Status::ok) return nullptr;
    bool all = true;
    for (int r = 0; r < size_; r++) all = all && *reinterpret_cast<int32_t*>(stage(r)) == 1;
    // The regions of others are mapped as they are touched: a reduction touches its slice of each.
    if (all && common) madvise(mapping->data(), mapping->bytes(), MADV_POPULATE_WRITE);
    if (status = meet(); status != Status::ok) return nullptr;
    next_stage();
    if (!all) {
        status = Status::no_memory;
        return nullptr;
    }
    arena_.add(made);
    return made;
}

}  // namespace dure
