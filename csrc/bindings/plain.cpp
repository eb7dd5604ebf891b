// The fast path: a call on plain tensors.
//
// What the slow path, through Python, checks step by step (comm/group) is checked here in one
// place, and whatever is not as simple as it could be is declined, so that the slow path deals with
// it and words its errors: tensors that are not plain, sizes that do not fit together, reductions
// without a meaning for the dtype, a call from a forked child or a signal handler, or while a graph
// is captured, a hook listens or a profiler runs.
//
// Small operations keep the GIL until they would have to wait (interrupt.h).
#include "engine.h"
#include "kernels.h"

namespace nb = nanobind;

namespace dure {

namespace {

constexpr int kNumTags = 0x7FFFFFF0;  // as in comm/checks.py

bool is_float(DType d) { return d <= DType::bf16; }
bool is_integer(DType d) { return d >= DType::i8 && d <= DType::u64; }

// As `check_reducible` in comm/ops.py, for the dtypes of plain tensors.
bool has_meaning(Reduction reduction, DType dtype) {
    switch (reduction) {
        case Reduction::band:
        case Reduction::bor:
        case Reduction::bxor:
            return is_integer(dtype);
        case Reduction::none:
            return false;
        default:
            return is_float(dtype) || is_integer(dtype);
    }
}

// Both tensors plain, of one dtype, and `one` n times as long as the other.
bool fit(nb::handle one, nb::handle other, size_t n, PlainTensor& a, PlainTensor& b) {
    return read_plain(one, a) && read_plain(other, b) && a.dtype == b.dtype &&
           a.block.bytes == n * b.block.bytes;
}

// Whether two blocks have no byte in common.
bool apart(const Block& a, const Block& b) {
    return a.data + a.bytes <= b.data || b.data + b.bytes <= a.data;
}

// Whether an operation may read one block while it writes the other: they are apart, or the part of
// the longer one that is this rank's own is the shorter one, as with MPI_IN_PLACE. Where they
// overlap in another way, the slow path copies the input.
bool apart_or_in_place(const Block& whole, const Block& part, int rank) {
    return apart(whole, part) ||
           (whole.data + static_cast<size_t>(rank) * part.bytes == part.data &&
            whole.bytes % part.bytes == 0);
}

void cut(const Block& whole, int n, std::vector<Block>& parts) {
    const size_t length = whole.bytes / static_cast<size_t>(n);
    parts.resize(static_cast<size_t>(n));
    for (size_t i = 0; i < parts.size(); i++) parts[i] = {whole.data + i * length, length};
}

// Cut a tensor [rows, n, *] along its second dimension. False where it does not divide, or is cut
// into runs so short that another one packs them quicker.
bool cut(const PlainTensor& whole, int rows, int n, std::vector<Block>& parts, Runs& runs) {
    constexpr size_t kLeastRun = 32;
    if (rows < 1) return false;
    const Block all = whole.block;
    const size_t count = static_cast<size_t>(rows), pieces = count * static_cast<size_t>(n);
    const size_t run = all.bytes / pieces;
    if (all.bytes % (pieces * item_bytes(whole.dtype)) != 0) return false;
    if (rows > 1 && run < kLeastRun) return false;
    if (rows > 1) runs = {count, run * static_cast<size_t>(n)};
    parts.resize(static_cast<size_t>(n));
    for (size_t i = 0; i < parts.size(); i++) parts[i] = {all.data + i * run, run * count};
    return true;
}

// A call whose lists keep their memory from one operation to the next. A thread runs one of our
// calls at a time; only a signal handler could begin another, and `may_begin` declines that, on
// whatever group.
Call& empty_call(Op op, DType dtype) {
    static thread_local Call call;
    call.op = op;
    call.dtype = dtype;
    call.reduction = Reduction::none;
    call.root = -1;
    call.inputs.clear();
    call.outputs.clear();
    call.given = call.taken = {};
    call.site = call_site();
    call.thread = thread_name();
    call.subject = thread_subject();
    return call;
}

// The value of a Python integer; -1 for anything else.
int number(nb::handle h) {
    if (!PyLong_CheckExact(h.ptr())) return -1;
    int overflow = 0;
    const long value = PyLong_AsLongAndOverflow(h.ptr(), &overflow);
    return overflow || value < 0 || value > INT32_MAX ? -1 : static_cast<int>(value);
}

nb::object declined() { return nb::borrow(Py_False); }

bool is_list(nb::handle h) { return PyList_CheckExact(h.ptr()) || PyTuple_CheckExact(h.ptr()); }

// The blocks of a list or tuple of `n` plain tensors of one dtype.
bool read_list(nb::handle list, int n, DType dtype, std::vector<Block>& blocks) {
    if (!is_list(list) || PySequence_Fast_GET_SIZE(list.ptr()) != n) return false;
    for (Py_ssize_t i = 0; i < n; i++) {
        PlainTensor t;
        if (!read_plain(PySequence_Fast_GET_ITEM(list.ptr(), i), t) || t.dtype != dtype) {
            return false;
        }
        blocks.push_back(t.block);
    }
    return true;
}

size_t bytes_of(const std::vector<Block>& blocks) {
    size_t bytes = 0;
    for (const Block& block : blocks) bytes += block.bytes;
    return bytes;
}

// Whether no two blocks have a byte in common.
bool apart(const std::vector<Block>& blocks) {
    for (size_t i = 0; i < blocks.size(); i++) {
        for (size_t j = i + 1; j < blocks.size(); j++) {
            if (!apart(blocks[i], blocks[j])) return false;
        }
    }
    return true;
}

// As `apart_or_in_place`, of a list of blocks and this rank's one.
bool apart_or_in_place(const std::vector<Block>& list, const Block& one, int rank) {
    for (size_t i = 0; i < list.size(); i++) {
        const bool own = i == static_cast<size_t>(rank) && list[i].data == one.data;
        if (!own && !apart(list[i], one)) return false;
    }
    return true;
}

// The tensors of a list, for as long as an operation uses them: the program may change the list.
nb::object kept(nb::handle list) { return nb::steal(PySequence_Tuple(list.ptr())); }

// Count a write to a tensor, or to each of a list.
void count_writes(nb::handle written) {
    if (!is_list(written)) return count_write(written);
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(written.ptr()); i++) {
        count_write(PySequence_Fast_GET_ITEM(written.ptr(), i));
    }
}

}  // namespace

nb::object Engine::plain(Place where, const Call& call, size_t bytes, nb::handle one,
                         nb::handle other) {
    if (other_thread(where.channel)) return declined();  // `run` makes the error
    Channel& on = group_->channel(where.channel);
    Channel::Turn turn(on);
    const uint64_t entry = note(where.channel, turn, call, where.async);
    const bool brief = bytes <= kBriefBytes;
    if (where.async) {
        auto request = on.start(call, std::move(turn), brief);
        request->record(flight_, entry);
        if (where.counts) count_writes(one);
        return started(request, call.site, one, other);
    }
    Stay stay(inside_[where.channel], call);
    const auto body = [&] {
        const Status s = on.run(call, std::move(turn));
        flight_->end(entry, s);
        stay.end();
        return s;
    };
    const Status s =
        brief ? call_briefly(group_.get(), body) : call_without_gil(group_.get(), body);
    if (s != Status::ok) return failed(s, call.op);
    if (where.counts) count_writes(one);
    return nb::borrow(Py_True);
}

nb::object Engine::plain_all_reduce(Place on, nb::handle tensor, nb::handle op) {
    const Reduction reduction = reduction_of(op);
    PlainTensor t;
    if (!may_begin() || !read_plain(tensor, t) || !has_meaning(reduction, t.dtype)) {
        return declined();
    }
    Call& call = empty_call(Op::all_reduce, t.dtype);
    call.reduction = reduction;
    call.outputs.push_back(t.block);
    return plain(on, call, t.block.bytes, tensor, nb::none());
}

nb::object Engine::plain_all_reduce_into(Place on, nb::handle output, nb::handle input,
                                         nb::handle op) {
    const Reduction reduction = reduction_of(op);
    PlainTensor out, in;
    if (!may_begin() || !fit(output, input, 1, out, in) || !has_meaning(reduction, in.dtype) ||
        !apart(out.block, in.block)) {
        return declined();
    }
    Call& call = empty_call(Op::all_reduce, in.dtype);
    call.reduction = reduction;
    call.inputs.push_back(in.block);
    call.outputs.push_back(out.block);
    return plain(on, call, out.block.bytes, output, input);
}

nb::object Engine::plain_broadcast(Place on, nb::handle tensor, nb::handle source) {
    PlainTensor t;
    const int root = number(source);
    if (!may_begin() || !is_rank(root) || !read_plain(tensor, t)) return declined();
    Call& call = empty_call(Op::broadcast, t.dtype);
    call.root = root;
    call.outputs.push_back(t.block);
    if (root == group_->rank()) on.counts = false;
    return plain(on, call, t.block.bytes, tensor, nb::none());
}

nb::object Engine::plain_all_gather(Place on, nb::handle output, nb::handle input) {
    PlainTensor out, in;
    const int n = group_->size();
    if (!may_begin() || !fit(output, input, static_cast<size_t>(n), out, in) ||
        !apart_or_in_place(out.block, in.block, group_->rank())) {
        return declined();
    }
    Call& call = empty_call(Op::all_gather, in.dtype);
    call.inputs.push_back(in.block);
    cut(out.block, n, call.outputs);
    return plain(on, call, out.block.bytes, output, input);
}

nb::object Engine::plain_reduce_scatter(Place on, nb::handle output, nb::handle input,
                                        nb::handle op) {
    const Reduction reduction = reduction_of(op);
    PlainTensor out, in;
    const int n = group_->size();
    if (!may_begin() || !fit(input, output, static_cast<size_t>(n), in, out) ||
        !has_meaning(reduction, in.dtype) ||
        !apart_or_in_place(in.block, out.block, group_->rank())) {
        return declined();
    }
    Call& call = empty_call(Op::reduce_scatter, in.dtype);
    call.reduction = reduction;
    cut(in.block, n, call.inputs);
    call.outputs.push_back(out.block);
    return plain(on, call, in.block.bytes, output, input);
}

nb::object Engine::plain_all_gather_list(Place on, nb::handle outputs, nb::handle input) {
    PlainTensor in;
    if (!may_begin() || !read_plain(input, in)) return declined();
    Call& call = empty_call(Op::all_gather, in.dtype);
    const int n = group_->size(), rank = group_->rank();
    if (!read_list(outputs, n, in.dtype, call.outputs) ||
        call.outputs[static_cast<size_t>(rank)].bytes != in.block.bytes || !apart(call.outputs) ||
        !apart_or_in_place(call.outputs, in.block, rank)) {
        return declined();
    }
    call.inputs.push_back(in.block);
    return plain(on, call, bytes_of(call.outputs), kept(outputs), input);
}

nb::object Engine::plain_reduce_scatter_list(Place on, nb::handle output, nb::handle inputs,
                                             nb::handle op) {
    const Reduction reduction = reduction_of(op);
    PlainTensor out;
    if (!may_begin() || !read_plain(output, out) || !has_meaning(reduction, out.dtype)) {
        return declined();
    }
    Call& call = empty_call(Op::reduce_scatter, out.dtype);
    call.reduction = reduction;
    const int n = group_->size(), rank = group_->rank();
    if (!read_list(inputs, n, out.dtype, call.inputs) ||
        call.inputs[static_cast<size_t>(rank)].bytes != out.block.bytes ||
        !apart_or_in_place(call.inputs, out.block, rank)) {
        return declined();
    }
    call.outputs.push_back(out.block);
    return plain(on, call, bytes_of(call.inputs), output, kept(inputs));
}

nb::object Engine::plain_all_to_all_list(Place on, nb::handle outputs, nb::handle inputs) {
    PlainTensor first;
    if (!may_begin() || !is_list(inputs) || PySequence_Fast_GET_SIZE(inputs.ptr()) == 0 ||
        !read_plain(PySequence_Fast_GET_ITEM(inputs.ptr(), 0), first)) {
        return declined();
    }
    Call& call = empty_call(Op::all_to_all, first.dtype);
    const int n = group_->size();
    const auto own = static_cast<size_t>(group_->rank());
    if (!read_list(inputs, n, first.dtype, call.inputs) ||
        !read_list(outputs, n, first.dtype, call.outputs) ||
        call.inputs[own].bytes != call.outputs[own].bytes || !apart(call.outputs)) {
        return declined();
    }
    for (const Block& input : call.inputs) {
        for (const Block& output : call.outputs) {
            if (!apart(input, output)) return declined();
        }
    }
    return plain(on, call, bytes_of(call.outputs), kept(outputs), kept(inputs));
}

nb::object Engine::plain_all_to_all(Place on, nb::handle output, nb::handle input) {
    PlainTensor out, in;
    const int n = group_->size();
    if (!may_begin() || !fit(output, input, 1, out, in) ||
        !apart_or_in_place(out.block, in.block, 0)) {
        return declined();
    }
    if (in.rows % n != 0 || out.rows % n != 0) return declined();
    Call& call = empty_call(Op::all_to_all, in.dtype);
    cut(in.block, n, call.inputs);
    cut(out.block, n, call.outputs);
    return plain(on, call, in.block.bytes, output, input);
}

nb::object Engine::plain_all_to_all_cut(Place on, nb::handle output, nb::handle input,
                                        nb::handle taken_rows, nb::handle given_rows) {
    PlainTensor out, in;
    const int n = group_->size();
    if (!may_begin() || !fit(output, input, 1, out, in) || !apart(out.block, in.block)) {
        return declined();
    }
    Call& call = empty_call(Op::all_to_all, in.dtype);
    if (!cut(in, number(given_rows), n, call.inputs, call.given) ||
        !cut(out, number(taken_rows), n, call.outputs, call.taken)) {
        return declined();
    }
    return plain(on, call, in.block.bytes, output, input);
}

nb::object Engine::plain_scatter_cut(Place on, nb::handle output, nb::handle input,
                                     nb::handle source, nb::handle given_rows) {
    PlainTensor out, in;
    const int n = group_->size(), root = number(source);
    if (!may_begin() || !is_rank(root) || !fit(input, output, static_cast<size_t>(n), in, out) ||
        !apart(out.block, in.block)) {
        return declined();
    }
    Call& call = empty_call(Op::scatter, out.dtype);
    call.root = root;
    call.outputs.push_back(out.block);
    if (root == group_->rank() && !cut(in, number(given_rows), n, call.inputs, call.given)) {
        return declined();
    }
    return plain(on, call, out.block.bytes, output, input);
}

nb::object Engine::plain_barrier(Place on) {
    if (!may_begin()) return declined();
    Call& call = empty_call(Op::barrier, DType::f64);
    return plain(on, call, 0, nb::none(), nb::none());
}

nb::object Engine::plain_message(const Message& message, nb::handle tensor, bool counts) {
    PlainTensor t;
    if (forked() || is_watched() || PythonCall::inside(mailbox_.get()) || !is_rank(message.peer) ||
        message.peer == group_->rank() || message.tag < 0 || message.tag >= kNumTags ||
        !read_plain(tensor, t)) {
        return declined();
    }
    Mailbox* box = mailbox_.get();
    const uint64_t entry = note(message, t.block, t.dtype, call_site(), false);
    Outcome out;
    const auto body = [&] {
        int source = -1;
        out = message.op == Op::send
                  ? box->send(t.block, t.dtype, message.peer, message.tag)
                  : box->receive(t.block, t.dtype, message.peer, message.tag, &source);
        flight_->end(entry, out.status);
        return true;
    };
    t.block.bytes <= kBriefBytes ? call_briefly(box, body) : call_without_gil(box, body);
    if (out.status != Status::ok) return nb::cast(out);
    if (counts) count_write(tensor);
    return nb::borrow(Py_True);
}

nb::object Engine::plain_send(nb::handle tensor, nb::handle to, nb::handle tag) {
    return plain_message({Op::send, number(to), number(tag)}, tensor, false);
}

nb::object Engine::plain_receive(nb::handle tensor, nb::handle from, nb::handle tag, bool counts) {
    return plain_message({Op::recv, number(from), number(tag)}, tensor, counts);
}

}  // namespace dure
