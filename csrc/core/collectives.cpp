// Which operation is whose, and the few that need no file of their own.
#include "channel.h"

namespace dure {

Status Channel::carry_out(const Call& call) {
    switch (call.op) {
        case Op::barrier:
            write_header(call, 0, 0);
            return exchange_headers();
        case Op::new_group:  // it is made elsewhere; here the ranks find out that all of them make
                             // it
            write_header(call, call.members, 0);
            return exchange_headers();
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
}

// Note "Node-shared memory". Rank 0 allocates in its heap before the header exchange, for all ranks
// to hold, and says where in its slot (-1: there is no memory); after the exchange each holds it
// (SymmetricHeap). So all ranks fail together, and it costs one barrier.
std::shared_ptr<HeapMemory> Channel::allocate_node_shared(size_t bytes, Status& status,
                                                          const Site* site) {
    Call call;
    call.op = Op::host_shared_empty;
    call.site = site;
    write_header(call, bytes, 0);
    std::shared_ptr<HeapMemory> made;
    int64_t offset = -1;
    if (rank_ == 0) {
        std::vector<std::shared_ptr<Process>> holders;
        for (int r = 0; r < size_; r++) holders.push_back(group_.process(r));
        made = group_.heap().allocate_node_shared(bytes, std::move(holders));
        if (made) offset = made->data - group_.heap().base();
    }
    std::memcpy(slot(rank_).inlined, &offset, sizeof offset);
    if (status = exchange_headers(); status != Status::ok) return nullptr;
    std::memcpy(&offset, slot(0).inlined, sizeof offset);
    if (offset < 0) {
        status = Status::no_memory;
        return nullptr;
    }
    if (rank_ == 0) return made;
    const std::shared_ptr<Process>& owner = group_.process(0);
    return SymmetricHeap::hold_node_shared(owner, owner->heap() + offset, bytes, rank_);
}

}  // namespace dure
