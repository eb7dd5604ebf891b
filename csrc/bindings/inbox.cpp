// Messages of this host's processes (csrc/core/inbox.h), and memory that is given to one of them.
#include "inbox.h"

#include <nanobind/stl/shared_ptr.h>

#include <atomic>
#include <memory>
#include <string>

#include "bindings.h"
#include "interrupt.h"

namespace nb = nanobind;

namespace dure {

namespace {

// A message as bytes; True: the ticket is done; None: neither in time; False: it was closed.
nb::object next(Inbox& inbox, const std::shared_ptr<Inbox::Ticket>& ticket, double seconds) {
    std::string message;
    Inbox::Got got;
    {
        const WithoutGil release;
        got = inbox.next(ticket, now_ns() + nanoseconds(seconds), message);
    }
    switch (got) {
        case Inbox::Got::message:
            return nb::bytes(message.data(), message.size());
        case Inbox::Got::done:
            return nb::bool_(true);
        case Inbox::Got::closed:
            return nb::bool_(false);
        case Inbox::Got::nothing:
            break;
    }
    return nb::none();
}

bool send(Outbox& outbox, const nb::bytes& message) {
    return outbox.send(static_cast<const std::byte*>(message.data()), message.size());
}

// Memory of this process' heap that is another's alone once this process lets go of it.
std::shared_ptr<HeapMemory> give(size_t bytes, const std::shared_ptr<Process>& to) {
    const WithoutGil release;
    return SymmetricHeap::of_process().allocate_node_shared(bytes, {nullptr, to}, false);
}

// How much of other processes' memory this one holds.
std::atomic<size_t> taken_bytes{0};

// What a peer has given: held until this process lets go of it.
std::shared_ptr<HeapMemory> take(const std::shared_ptr<Process>& from, uint64_t offset,
                                 size_t bytes) {
    const size_t all = from->heap_bytes();
    if (offset > all || bytes > all - offset) throw nb::value_error("not in the peer's heap");
    auto held = SymmetricHeap::hold_node_shared(from, from->heap() + offset, bytes, 1);
    taken_bytes += bytes;
    auto let_go = [held, bytes](const void*) { taken_bytes -= bytes; };
    std::byte* data = held->data;
    return std::make_shared<HeapMemory>(data, bytes, std::shared_ptr<const void>(data, let_go));
}

}  // namespace

void bind_inbox(nb::module_& m) {
    nb::class_<Inbox::Ticket>(m, "Ticket").def(nb::init<>()).def_ro("done", &Inbox::Ticket::done);
    nb::class_<Inbox>(m, "Inbox")
        .def(nb::init<>())
        .def_prop_ro("offset", &Inbox::offset)
        .def("next", &next, nb::arg("ticket").none(), nb::arg("seconds"))
        .def("complete", &Inbox::complete)
        .def("post",
             [](Inbox& inbox, const nb::bytes& message) {
                 inbox.post(std::string(message.c_str(), message.size()));
             })
        .def("forget", &Inbox::forget)
        .def("close", &Inbox::close);
    nb::class_<Outbox>(m, "Outbox").def_static("claim", &Outbox::claim).def("send", &send);
    m.def("heap_give", &give);
    m.def("heap_take", &take);
    m.def("heap_taken", [] { return taken_bytes.load(); });
}

}  // namespace dure
