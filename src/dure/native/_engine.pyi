"""What the extension offers; csrc/bindings has one file a class.

Addresses and byte counts are plain integers. `dtype`, `reduction` and `op` are the codes of
csrc/core/types.h. A call that can be asynchronous returns None when it is done, an `Outcome` when
it failed, or a `Request` where ``async_op`` is true.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

class Outcome:
    """How an operation failed."""

    @property
    def status(self) -> int:
        """A member of `dure.native.status.Status`."""
    @property
    def op(self) -> str:
        """The operation that failed, or that the group broke in."""
    @property
    def channel(self) -> int:
        """The channel of the collective."""
    @property
    def seq(self) -> int:
        """Number of the collective in its channel; 0 for point-to-point."""
    @property
    def peer(self) -> int:
        """The rank to blame, or -1."""
    @property
    def reporter(self) -> int:
        """The rank that noticed, or -1."""
    @property
    def missing(self) -> list[int]:
        """Ranks that did not arrive."""
    @property
    def calls(self) -> list[str]:
        """What each rank called, of a desync."""
    @property
    def detail(self) -> str:
        """How the peer ended, where known."""

class Request:
    """A pending operation; any thread may ask at any time (as `comm.backends.request.Request`)."""

    @property
    def source(self) -> int:
        """Sender of a finished receive, or -1."""
    @property
    def site(self) -> str:
        """Where the program called, as "file:line in function"."""
    def done(self) -> bool:
        """Tell whether the operation ended."""
    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait, at most `timeout_s`; False if that passed first. Raise the operation's error."""
    def wait_aside(self) -> None:
        """Wait on a thread whose core others may want: run nothing, and let nobody spin."""

class HeapMemory:
    """A piece of a symmetric heap; a writable buffer, held for as long as a view of it lives."""

    @property
    def offset(self) -> int:
        """Where in this process's heap it lies; -1 if it is a peer's, or was retired."""
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Channel:
    """One channel of a group: its collectives, and the messages of the group."""

    @property
    def index(self) -> int:
        """0 or 1."""
    def enter(self) -> bool | Outcome:
        """Begin a block of calls of this thread alone; False if it is in one already."""
    def leave(self) -> None:
        """End the block that `enter` began."""
    def run(
        self,
        op: int,
        dtype: int,
        reduction: int,
        root: int,
        inputs: list[int],
        outputs: list[int],
        into: int,
        factor: float,
        subject: Subject,
        async_op: bool,
        keep: object,
        /,
    ) -> Outcome | Request | None:
        """Run any collective: a list holds address, length, address, length...

        `keep` lives until it has ended. The plain calls are about what the thread has said.
        """
    def plain_all_reduce(self, tensor: object, op: object, counts: bool, /) -> bool | Outcome:
        """Reduce a plain tensor; False where it is not plain and nothing was done."""
    def plain_all_reduce_into(
        self, output: object, tensor: object, op: object, /
    ) -> bool | Outcome:
        """Reduce plain tensors into another one of the same length."""
    def plain_broadcast(self, tensor: object, root: int, counts: bool, /) -> bool | Outcome:
        """Broadcast a plain tensor."""
    def plain_all_gather(self, output: object, tensor: object, counts: bool, /) -> bool | Outcome:
        """Gather plain tensors into one that is n times as long."""
    def plain_reduce_scatter(
        self, output: object, tensor: object, op: object, counts: bool, /
    ) -> bool | Outcome:
        """Reduce part i of a plain tensor into rank i's."""
    def plain_all_to_all(self, output: object, tensor: object, counts: bool, /) -> bool | Outcome:
        """Exchange equal parts of plain tensors."""
    def plain_all_to_all_cut(
        self, output: object, tensor: object, taken_rows: int, given_rows: int, /
    ) -> bool | Outcome:
        """Exchange parts of plain tensors [rows, n, *], each cut along its second dimension."""
    def plain_scatter_cut(
        self, output: object, tensor: object, root: int, given_rows: int, /
    ) -> bool | Outcome:
        """Scatter the root's plain tensor [rows, n, *], cut along its second dimension."""
    def plain_barrier(self) -> bool | Outcome:
        """Wait for all ranks."""
    def start_all_reduce(
        self, tensor: object, op: object, counts: bool, /
    ) -> bool | Outcome | Request:
        """Start `plain_all_reduce`."""
    def start_all_reduce_into(
        self, output: object, tensor: object, op: object, /
    ) -> bool | Outcome | Request:
        """Start `plain_all_reduce_into`."""
    def start_broadcast(
        self, tensor: object, root: int, counts: bool, /
    ) -> bool | Outcome | Request:
        """Start `plain_broadcast`."""
    def start_all_gather(
        self, output: object, tensor: object, counts: bool, /
    ) -> bool | Outcome | Request:
        """Start `plain_all_gather`."""
    def start_reduce_scatter(
        self, output: object, tensor: object, op: object, counts: bool, /
    ) -> bool | Outcome | Request:
        """Start `plain_reduce_scatter`."""
    def start_all_to_all(
        self, output: object, tensor: object, counts: bool, /
    ) -> bool | Outcome | Request:
        """Start `plain_all_to_all`."""
    def start_all_to_all_cut(
        self, output: object, tensor: object, taken_rows: int, given_rows: int, /
    ) -> bool | Outcome | Request:
        """Start `plain_all_to_all_cut`."""
    def start_scatter_cut(
        self, output: object, tensor: object, root: int, given_rows: int, /
    ) -> bool | Outcome | Request:
        """Start `plain_scatter_cut`."""
    def start_barrier(self) -> bool | Outcome | Request:
        """Start `plain_barrier`."""
    def plain_send(self, tensor: object, to: int, tag: int, /) -> bool | Outcome:
        """Send a plain tensor."""
    def plain_receive(
        self, tensor: object, source: int, tag: int, counts: bool, /
    ) -> bool | Outcome:
        """Receive into a plain tensor."""

class Process:
    """A process of this host whose heap is mapped here."""

    @property
    def pid(self) -> int:
        """Its number."""
    def dead(self) -> bool:
        """Tell whether it has ended; False of this very process."""
    def fate(self) -> str:
        """Return how it ended, such as "signal 9 (SIGKILL)"; "" if that is not known."""
    def memory(self, offset: int, nbytes: int, /) -> HeapMemory:
        """Return a part of its heap; ValueError outside it."""

class Group:
    """This rank's end of a shared segment, with its channels and mailbox (csrc/core/group.h)."""

    @staticmethod
    def create(
        rank: int,
        size: int,
        timeout_s: float,
        cores: int,
        nonce: int,
        /,
        single_copies: int = -1,
        migrates: bool = False,
    ) -> Group:
        """Make the segment; OSError if the system refuses.

        `single_copies`: from how many bytes on to copy once; -1: measure, -2: never. `migrates`:
        a rank that shares its core with another may move its thread to an idle one.
        """
    @staticmethod
    def attach(
        rank: int,
        size: int,
        timeout_s: float,
        cores: int,
        pid: int,
        fd: int,
        nonce: int,
        /,
        migrates: bool = False,
    ) -> Group:
        """Map the segment that process `pid` holds as `fd`; OSError or RuntimeError if not."""
    @property
    def file(self) -> int:
        """Descriptor of the segment, until `ready`."""
    def attached(self) -> int:
        """Ranks that have mapped the segment."""
    def not_attached(self) -> list[int]:
        """Ranks that have not."""
    def wait_attached(self, seconds: float, /) -> None:
        """Return when another rank has attached, or the time is over."""
    def ready(self) -> None:
        """Begin, once all have attached; lets go of the descriptor."""
    @property
    def copies(
        self,
    ) -> tuple[bool, bool, float, int | None, int | None, int | None]:
        """How memory is copied between ranks, known after `ready`.

        Single copies permitted; measured; us a cache line takes; bytes from which on messages,
        blocks for all, and blocks for each rank are copied once (None: never).
        """
    def set_eager_bytes(self, nbytes: int, /) -> None:
        """Let longer messages wait for their receive; 0: all; negative: those that must."""
    def gone(self, rank: int, /) -> bool:
        """Tell whether the process of `rank` has ended, or `rank` has left the group."""
    def pid_of(self, rank: int, /) -> int:
        """Process of `rank`; 0 after `close`."""
    def set_error(self, error: Callable[[Outcome, int, float], BaseException], /) -> None:
        """Say what makes the exception of an outcome, its peer's process and the time limit."""
    def set_timeout(self, seconds: float, /) -> None:
        """Change how long an operation may wait for its peers."""
    def channel(self, index: int, /) -> Channel:
        """Return channel 0 or 1; it keeps the group."""
    def announce_group(self, members: int, async_op: bool, /) -> Outcome | Request | None:
        """Find out whether all ranks make the same group: a bit for each member, or a digest."""
    def send(
        self, data: int, nbytes: int, dtype: int, to: int, tag: int, async_op: bool, keep: object, /
    ) -> Outcome | Request | None:
        """Send to rank `to`."""
    def receive(
        self,
        data: int,
        nbytes: int,
        dtype: int,
        source: int,
        tag: int,
        async_op: bool,
        keep: object,
        /,
    ) -> Request:
        """Receive from `source`, -1 for anyone; a finished request where not asynchronous."""
    def flight(
        self,
    ) -> list[tuple[int, str, int, str, int, int, int, bool, int, int, int, str, int, str, int]]:
        """Return the last operations, oldest first.

        Each is: seq, op, dtype, reduction, nbytes, peer, tag, async, status (-1 while it runs),
        start and end in monotonic ns, file, line, function, channel.
        """
    def sender_of(self, tag: int, /) -> int:
        """Return who sent the first message with `tag` that awaits its receive; -1 if none did."""
    def host_shared_empty(self, nbytes: int, /) -> HeapMemory | Outcome:
        """Allocate, in rank 0's heap, memory that all ranks have; a collective."""
    def abort(self, detail: str, /) -> None:
        """Break the group for all ranks, for a reason outside it; nothing after `close`."""
    def failure(self) -> Outcome | None:
        """Return what the group is broken by."""
    def has_left(self, rank: int, /) -> bool:
        """Tell whether `rank` closed its group; True after `close`."""
    def close(self) -> None:
        """Leave; safe to call twice, from any thread."""

def heap_allocate(bytes: int, zeroed: bool, copied: bool = False) -> HeapMemory | None:
    """Allocate in this process's heap; None where the host has no memory left.

    `copied`: forked children get a copy of their own.
    """

def not_copied_in_children() -> int:
    """Return how many bytes of `copied` memory a fork now would not copy: they are too many."""

def put_into_storage(memory: HeapMemory, storage: int, address: int, nbytes: int, /) -> bool:
    """Put `memory` in the place of what a small storage of torch's holds.

    `storage` is its `_cdata`, `address` and `nbytes` what it holds. False where it does not look as
    this torch's storages are known to: nothing has changed then.
    """

class Ticket:
    """Something that a thread waits for in `Inbox.next`, and that another one brings."""

    def __init__(self) -> None: ...
    @property
    def done(self) -> bool:
        """Whether it was brought."""

class Inbox:
    """Messages from the other processes of this host (csrc/core/inbox.h)."""

    def __init__(self) -> None: ...
    @property
    def offset(self) -> int:
        """Where in the heap it is."""
    def next(self, ticket: Ticket | None, seconds: float) -> bytes | bool | None:
        """Return a message; True: the ticket is done; None: nothing came; False: it was closed."""
    def complete(self, ticket: Ticket, /) -> None:
        """Bring what a ticket stands for; wakes who waits for it."""
    def post(self, message: bytes, /) -> None:
        """Leave a message for a thread that waits without a ticket."""
    def forget(self, pid: int, /) -> bool:
        """Free the ring of a process that ended; False: it has messages still."""
    def close(self) -> None:
        """End all waits."""

class Outbox:
    """One ring of another process's inbox."""

    @staticmethod
    def claim(peer: Process, offset: int, /) -> Outbox | None:
        """Take a ring of the inbox that is at `offset` of the peer's heap; None: all are taken."""
    def send(self, message: bytes, /) -> bool:
        """Send; False: it does not fit, now or (above 16 KiB) ever."""

def heap_give(bytes: int, to: Process, address: int = 0) -> HeapMemory | None:
    """Allocate memory in this heap that is the peer's alone when this process lets go of it.

    What is at `address` is copied into it.
    """

def heap_share(nbytes: int, /) -> HeapMemory | None:
    """Allocate memory in this heap that others may hold as well, for as long as they like."""

def heap_lend(address: int, to: Process | None) -> int:
    """Have a peer (None: nobody) hold memory of `heap_share`; return by what; 0: it is none."""

def heap_take(source: Process, offset: int, bytes: int, hold: int = 0) -> HeapMemory:
    """Hold memory that a peer has given, or (by `hold`) lent, until it is let go of here."""

def heap_taken() -> int:
    """Return how many bytes this process holds that peers have given."""

def heap_identity() -> tuple[int, int, int]:
    """Return how peers find the heap: pid, start time of the process, descriptor of the heap."""

def heap_peer(pid: int, start_time: int, descriptor: int, /) -> Process | None:
    """Map the heap of another process (or find it mapped); None if it has ended, or OSError."""

def heap_offset(address: int, nbytes: int, /) -> int:
    """Return where in this process's heap that memory lies; -1 for other memory."""

def heap_trim() -> int:
    """Give the memory of freed pieces back to the system; return how many bytes."""

def heap_usage() -> tuple[int, int, int]:
    """Return bytes in use, bytes kept for new pieces, and the number of pieces."""

def change_word(
    memory: HeapMemory,
    index: int,
    before: int,
    after: int,
    peer: Process,
    seconds: float,
    /,
) -> int:
    """Wait until 32-bit word `index` is `before`, and make it `after` in one step.

    Returns 0 when done, 1 after `seconds` (for ever, if negative), 2 if `peer` has died.
    """

def know_torch(
    tensor: type,
    parameter: type,
    reductions: list[object],
    c: object,
    sample: Tensor,
    hooks: list[Any],
    /,
) -> bool:
    """Learn torch's types, our reductions and the hooks of `dure.trace`, for the `plain_` calls.

    `c` is torch._C, whose functions are called where torch's C++ functions are not found; `sample`
    is an empty tensor. The `plain_` calls decline while there are hooks.
    False where torch lacks DLPack's exchange table: they then decline everything.
    """

def pack_tensor(tensor: Tensor, most: int, needs_gradient: bool, /) -> bytes | None:
    """Return a plain tensor (dense, contiguous, not empty, of a real dtype, on the CPU) as bytes.

    The first byte is `needs_gradient`. None for other tensors, for those of more than `most` bytes,
    and for those whose memory lies in the symmetric heap.
    """

def unpack_tensor(packed: bytes, /) -> Tensor:
    """Return the tensor that `pack_tensor` has packed, with memory of its own.

    Raises:
        ValueError: These bytes are none.
    """

def set_library_folders(folders: list[tuple[str, bool]], /) -> None:
    """Set which files are the library's (`dure.trace.frames.library_folders`)."""

def call_site() -> str:
    """Return the place of the user's program that calls, as "file:line in function"."""

def crc32c(data: bytes | bytearray | memoryview, before: int = 0, /) -> int:
    """Return the CRC-32C of bytes that follow others whose sum is `before`."""

def copy_bytes(to: bytearray | memoryview, source: bytes | bytearray | memoryview, /) -> None:
    """Copy as many bytes as both have, past the cache; ValueError where lengths differ."""

def copy_from_file(
    descriptor: int, at: int, to: bytearray | memoryview, summed: bool, /
) -> tuple[int, int]:
    """Copy bytes of a file, from byte `at` on, past the cache; return how many, and their CRC-32C.

    Fewer, or none, where the file cannot be mapped, ends or fails: reading the rest tells which.
    """

class Subject:
    """What collectives are about, beyond their lengths; ranks compare the code, and show the text.

    Of a code below 2^30; 0 says nothing.
    """

    def __init__(self, code: int, text: str, /) -> None: ...
    @property
    def code(self) -> int:
        """What is compared."""
    @property
    def text(self) -> str:
        """What it stands for."""

def set_subject(about: Subject, /) -> None:
    """Say what the calling thread's collectives are about, until it says something else."""

def subject() -> Subject:
    """Return what the calling thread's collectives are about."""

protocol: int
"""`dure.version.PROTOCOL` of the sources that it was built from."""

def kernel_isa() -> str:
    """Return the instruction set of the kernels in use: generic, avx2 or avx512."""

def select_kernel_isa(isa: str, /) -> bool:
    """Use other kernels from now on (for tests); False where this machine cannot."""

def limit_isa(most: str, /) -> bool:
    """Use the best kernels up to these from now on; False where they have no such name."""

def reduce(out: int, sources: list[int], dtype: int, reduction: int, count: int, /) -> bool:
    """Run one kernel on `count` elements; False where the reduction has no meaning."""
