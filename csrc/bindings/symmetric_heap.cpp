// The symmetric heap of this process, and what it reaches of its peers' (csrc/core).
#include "symmetric_heap.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <memory>

#include "bindings.h"
#include "forking.h"
#include "interrupt.h"
#include "signals.h"

namespace nb = nanobind;

namespace dure {

namespace {

int get_buffer(PyObject* self, Py_buffer* view, int flags) {
    HeapMemory* memory = nb::inst_ptr<HeapMemory>(nb::handle(self));
    return PyBuffer_FillInfo(view, self, memory->data, static_cast<Py_ssize_t>(memory->bytes), 0,
                             flags);
}

PyType_Slot slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)}, {0, nullptr}};

std::shared_ptr<HeapMemory> allocate(size_t bytes, bool zeroed, bool copied) {
    const WithoutGil release;
    return SymmetricHeap::of_process().allocate(bytes, zeroed, copied);
}

// Note "Storages". torch makes storages over memory of others that cannot be resized. So a small
// storage of torch's own, which can, gets the heap's memory in the place of its own: in torch's
// StorageImpl its address, how it is freed, the device and the length lie side by side. All of them
// must be found there as they are known to be; else nothing is changed.
bool put_into_storage(const HeapMemory& memory, size_t storage, size_t data, size_t bytes) {
    using Free = void (*)(void*);
    constexpr size_t kWords = 8, kCpu = 0xFF00;  // type 0, index -1
    auto* words = reinterpret_cast<uintptr_t*>(storage);
    for (size_t i = 2; i + 4 < kWords; i++) {
        if (words[i] != data) continue;
        // A unique_ptr with the memory itself as its context, in either order.
        const size_t context = words[i + 2] == data ? i + 2 : i + 1, free = 2 * i + 3 - context;
        if (words[context] != data || words[free] == 0 || words[free] == data ||
            (words[i + 3] & 0xFFFF) != kCpu || words[i + 4] != bytes)
            return false;
        auto* holder = new std::shared_ptr<const void>(memory.holder);
        const auto free_before = reinterpret_cast<Free>(words[free]);
        words[i] = reinterpret_cast<uintptr_t>(memory.data);
        words[context] = reinterpret_cast<uintptr_t>(holder);
        words[free] = reinterpret_cast<uintptr_t>(
            Free{[](void* held) { delete static_cast<std::shared_ptr<const void>*>(held); }});
        words[i + 4] = memory.bytes;
        free_before(reinterpret_cast<void*>(data));
        return true;
    }
    return false;
}

// Who this process is to others: pid, start time, descriptor of its heap.
std::tuple<int, uint64_t, int> identity() {
    const SymmetricHeap& heap = SymmetricHeap::of_process();
    return {heap.page().pid, heap.page().start_time, heap.file()};
}

// Where in the heap a peer finds [address, address + bytes), or -1.
int64_t offset_of(size_t address, size_t bytes) {
    const SymmetricHeap& heap = SymmetricHeap::of_process();
    const auto* data = reinterpret_cast<const std::byte*>(address);
    return heap.shares(data, bytes) ? data - heap.base() : -1;
}

std::shared_ptr<HeapMemory> memory_of(const std::shared_ptr<Process>& process, uint64_t offset,
                                      size_t bytes) {
    const size_t all = process->heap_bytes();
    if (offset > all || bytes > all - offset) throw nb::value_error("not in the peer's heap");
    return std::make_shared<HeapMemory>(process->heap() + offset, bytes, process);
}

// Wait until word `index` of `memory` is `from`, and make it `to`: 0 when done, 1 after `seconds`,
// 2 where `peer`, who is to change it, has died.
int change_word(const HeapMemory& memory, size_t index, uint32_t from, uint32_t to,
                const Process& peer, double seconds) {
    constexpr int64_t kInterruptNs = 100'000'000;
    if ((index + 1) * sizeof(Word) > memory.bytes) throw nb::value_error("no such signal");
    Word& word = reinterpret_cast<Word*>(memory.data)[index];
    if (change(word, from, to)) return 0;
    const int64_t began = now_ns();
    const int64_t deadline = seconds < 0 ? INT64_MAX : began + nanoseconds(seconds);
    int64_t asked = began;
    return call_without_gil(&memory, [&] {
        return await_change(word, from, to, [&] {
            const int64_t now = now_ns();
            if (peer.dead()) return 2;
            if (now > deadline) return 1;
            if (now - asked <= kInterruptNs) return 0;
            asked = now;
            return PythonCall::interrupted() ? 1 : 0;
        });
    });
}

}  // namespace

// HeapMemory supports the buffer protocol: writable, and held for as long as a view lives.
void bind_symmetric_heap(nb::module_& m) {
    nb::class_<HeapMemory>(m, "HeapMemory", nb::type_slots(slots))
        .def_prop_ro("offset",
                     [](const HeapMemory& h) {
                         return offset_of(reinterpret_cast<size_t>(h.data), h.bytes);
                     })
        .def("__len__", [](const HeapMemory& h) { return h.bytes; });
    nb::class_<Process>(m, "Process")
        .def_prop_ro("pid", &Process::pid)
        .def("dead", &Process::dead)
        .def("fate", &Process::fate, nb::call_guard<WithoutGil>())
        .def("memory", &memory_of);
    m.def("heap_allocate", &allocate, nb::arg("bytes"), nb::arg("zeroed"),
          nb::arg("copied") = false);
    m.def("put_into_storage", &put_into_storage);
    m.def("not_copied_in_children", &CopiedInChildren::not_copied);
    m.def("heap_identity", &identity);
    m.def("heap_offset", &offset_of);
    m.def("heap_peer",
          [](int pid, uint64_t start_time, int fd) { return Process::of(pid, start_time, fd); });
    m.def("heap_trim", [] {
        const WithoutGil release;
        return SymmetricHeap::of_process().trim();
    });
    m.def("heap_usage", [] {
        const SymmetricHeap::Usage u = SymmetricHeap::of_process().usage();
        return std::make_tuple(u.used, u.kept, u.num_pieces);
    });
    m.def("change_word", &change_word);
}

}  // namespace dure
