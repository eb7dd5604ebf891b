// Messages of this host's processes (csrc/core/inbox.h), and memory that is given to one of them.
#include "inbox.h"

#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <string>

#include "bindings.h"
#include "copying.h"
#include "forking.h"
#include "interrupt.h"

namespace nb = nanobind;

namespace dure {

namespace {

constexpr size_t kLargeCopyBytes = 4 * 1024 * 1024;  // more than a core's own cache
QuickerWay giving;

// A message as bytes; True: the ticket is done; None: neither in time; False: it was closed.
// `asked`: the outbox of the message that the ticket waits for, if it was sent patiently. Its bell
// is rung when that is due, also if this thread has messages to read all the time.
nb::object next(Inbox& inbox, const std::shared_ptr<Inbox::Ticket>& ticket, double seconds,
                const std::shared_ptr<Outbox>& asked) {
    std::string message;
    // Python's lock stays with who has it as long as there is something to do: another thread would
    // have to be woken to take it.
    Inbox::Got got = inbox.take(ticket, false, message);
    int64_t due_ns = asked ? asked->due_ns() : INT64_MAX;
    const auto ring_if_due = [&] {
        if (due_ns == INT64_MAX || now_ns() < due_ns) return;
        asked->remind();
        due_ns = INT64_MAX;
    };
    ring_if_due();
    if (got == Inbox::Got::nothing) {
        const int64_t deadline_ns = now_ns() + nanoseconds(seconds);
        do {
            {
                const WithoutGil release;
                inbox.wait(ticket, std::min(due_ns, deadline_ns));
                ring_if_due();
            }
            got = inbox.take(ticket, true, message);
        } while (got == Inbox::Got::nothing && now_ns() < deadline_ns);
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

bool send(Outbox& outbox, const nb::bytes& message, bool patient) {
    return outbox.send(static_cast<const std::byte*>(message.data()), message.size(), patient);
}

// Memory of this process' heap, a copy of what is at `address`, that is another's alone once this
// process lets go of it.
std::shared_ptr<HeapMemory> give(size_t bytes, const std::shared_ptr<Process>& to, size_t address) {
    const WithoutGil release;
    auto given = SymmetricHeap::of_process().allocate_node_shared(bytes, {nullptr, to}, false);
    if (given && address) {
        const auto* from = reinterpret_cast<const std::byte*>(address);
        if (bytes >= kLargeCopyBytes)
            large_copy(giving, given->data, from, bytes);
        else
            std::memcpy(given->data, from, bytes);
    }
    return given;
}

// Memory of this process' heap that others are told of, and hold as long as they like (`lend`).
std::shared_ptr<HeapMemory> share(size_t bytes) {
    const WithoutGil release;
    return SymmetricHeap::of_process().allocate_node_shared(bytes, {nullptr}, false, true);
}

// By what `to` holds the shared memory at `address`; 0: it is no such memory.
uint64_t lend(size_t address, const std::shared_ptr<Process>& to) {
    return SymmetricHeap::of_process().lend(reinterpret_cast<const std::byte*>(address), to);
}

// How much of what other processes have given this one holds.
std::atomic<size_t> taken_bytes{0};

// What a peer has given (`hold` is 0), or lent: held until this process lets go of it.
std::shared_ptr<HeapMemory> take(const std::shared_ptr<Process>& from, uint64_t offset,
                                 size_t bytes, uint64_t hold) {
    const size_t all = from->heap_bytes();
    if (offset < 2 * kPage || offset > all || bytes > all - offset || hold >= all)
        throw nb::value_error("not in the peer's heap");
    const std::byte* at = from->heap() + offset;
    if (hold) return SymmetricHeap::hold_lent(from, at, bytes, from->heap() + hold);
    auto held = SymmetricHeap::hold_node_shared(from, at, bytes, 1);
    std::byte* data = held->data;
    taken_bytes += bytes;
    auto copies = std::make_shared<CopiedInChildren>(data, bytes);
    auto let_go = [held, bytes, copies](const void*) { taken_bytes -= bytes; };
    return std::make_shared<HeapMemory>(data, bytes, std::shared_ptr<const void>(data, let_go));
}

}  // namespace

void bind_inbox(nb::module_& m) {
    nb::class_<Inbox::Ticket>(m, "Ticket").def(nb::init<>()).def_ro("done", &Inbox::Ticket::done);
    nb::class_<Inbox>(m, "Inbox")
        .def(nb::init<>())
        .def_prop_ro("offset", &Inbox::offset)
        .def("next", &next, nb::arg("ticket").none(), nb::arg("seconds"),
             nb::arg("asked").none() = nb::none())
        .def("complete", &Inbox::complete)
        .def("post",
             [](Inbox& inbox, const nb::bytes& message) {
                 inbox.post(std::string(message.c_str(), message.size()));
             })
        .def("forget", &Inbox::forget)
        .def("close", &Inbox::close);
    nb::class_<Outbox>(m, "Outbox")
        .def_static("claim", &Outbox::claim)
        .def("send", &send, nb::arg("message"), nb::arg("patient") = false)
        .def("remind", &Outbox::remind);
    m.def("heap_give", &give, nb::arg("bytes"), nb::arg("to"), nb::arg("address") = 0);
    m.def("heap_share", &share);
    m.def("heap_lend", &lend, nb::arg("address"), nb::arg("to").none());
    m.def("heap_take", &take, nb::arg("source"), nb::arg("offset"), nb::arg("bytes"),
          nb::arg("hold") = 0);
    m.def("heap_taken", [] { return taken_bytes.load(); });
}

}  // namespace dure
