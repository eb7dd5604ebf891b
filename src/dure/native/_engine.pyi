"""The native extension; csrc/bindings has one file per class.

Addresses and byte counts are plain integers. `dtype`, `reduction` and `op` are the codes of
csrc/core/types.h. A call with an ``async_op`` argument returns None if it has succeeded, an
`Outcome` if it has failed, or a `Request` if ``async_op`` is true.
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
        """The operation that failed, or during which the group broke."""
    @property
    def channel(self) -> int:
        """The channel of the collective."""
    @property
    def seq(self) -> int:
        """Number of the collective in its channel; 0 for point-to-point."""
    @property
    def peer(self) -> int:
        """The rank that caused the failure, or -1."""
    @property
    def reporter(self) -> int:
        """The rank that noticed, or -1."""
    @property
    def missing(self) -> list[int]:
        """Ranks that did not arrive."""
    @property
    def calls(self) -> list[str]:
        """The call of each rank, for a desync."""
    @property
    def detail(self) -> str:
        """How the peer ended, if known, or another detail."""

class Request:
    """A pending operation, as `comm.backends.request.Request`; for any thread at any time."""

    @property
    def source(self) -> int:
        """Sender of a finished receive, or -1."""
    @property
    def site(self) -> str:
        """The call site, as "file:line in function"."""
    def done(self) -> bool:
        """Return whether the operation has ended."""
    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for at most `timeout_s`, else return False. Raises the operation's error."""
    def wait_aside(self) -> None:
        """Wait without using the core: the thread runs no other operations and does not spin."""

class HeapMemory:
    """A block of a symmetric heap; a writable buffer that lives as long as its views."""

    @property
    def offset(self) -> int:
        """The offset in this process's heap; -1 if it is in a peer's heap, or was retired."""
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Channel:
    """One channel of a group: its collectives, and the messages of the group."""

    @property
    def index(self) -> int:
        """0 or 1."""
    def enter(self) -> bool | Outcome:
        """Reserve the channel for calls of this thread; False if it has reserved it already."""
    def leave(self) -> None:
        """Release the channel after `enter`."""
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
        """Run any collective; the lists have address, length, address, length, ...

        `keep` is kept alive until the end. The `plain_` calls use the thread's subject.
        """
    def plain_all_reduce(
        self, tensor: object, op: object, counts: bool, async_op: bool, /
    ) -> bool | Outcome | Request:
        """Reduce a plain tensor, or start to; False, without any effect, if it is not plain."""
    def plain_all_reduce_into(
        self, output: object, tensor: object, op: object, async_op: bool, /
    ) -> bool | Outcome | Request:
        """Reduce plain tensors into a plain tensor of the same length."""
    def plain_broadcast(
        self, tensor: object, root: int, counts: bool, async_op: bool, /
    ) -> bool | Outcome | Request:
        """Broadcast a plain tensor."""
    def plain_all_gather(
        self, output: object, tensor: object, counts: bool, async_op: bool, /
    ) -> bool | Outcome | Request:
        """Gather plain tensors into a tensor that is n times as long."""
    def plain_reduce_scatter(
        self, output: object, tensor: object, op: object, counts: bool, async_op: bool, /
    ) -> bool | Outcome | Request:
        """Reduce part i of the plain tensors into the output of rank i."""
    def plain_all_gather_list(
        self, outputs: object, tensor: object, counts: bool, async_op: bool, /
    ) -> bool | Outcome | Request:
        """Gather plain tensors into a list of plain tensors."""
    def plain_reduce_scatter_list(
        self, output: object, inputs: object, op: object, counts: bool, async_op: bool, /
    ) -> bool | Outcome | Request:
        """Reduce the plain tensors at place i of the lists into the output of rank i."""
    def plain_all_to_all_list(
        self, outputs: object, inputs: object, counts: bool, async_op: bool, /
    ) -> bool | Outcome | Request:
        """Exchange lists of plain tensors."""
    def plain_all_to_all(
        self, output: object, tensor: object, counts: bool, async_op: bool, /
    ) -> bool | Outcome | Request:
        """Exchange equal parts of plain tensors."""
    def plain_all_to_all_cut(
        self, output: object, tensor: object, taken_rows: int, given_rows: int, async_op: bool, /
    ) -> bool | Outcome | Request:
        """Exchange parts of plain tensors [rows, n, *], divided along the second dimension."""
    def plain_scatter_cut(
        self, output: object, tensor: object, root: int, given_rows: int, /
    ) -> bool | Outcome:
        """Scatter the root's plain tensor [rows, n, *], divided along the second dimension."""
    def plain_barrier(self, async_op: bool, /) -> bool | Outcome | Request:
        """Wait for all ranks."""
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
        """The process id."""
    def dead(self) -> bool:
        """Return whether it has ended; False for this process."""
    def fate(self) -> str:
        """Return how it ended, such as "signal 9 (SIGKILL)"; "" if unknown."""
    def memory(self, offset: int, nbytes: int, /) -> HeapMemory:
        """Return a part of its heap; raises ValueError outside it."""

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
        """Create the segment; raises OSError if the system refuses.

        `single_copies`: the bytes from which on memory is copied once; -1: measure, -2: never.
        `migrates`: whether a rank that shares its core with another may move its thread to an idle
        core.
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
        """Map the segment that is `fd` in process `pid`; raises OSError or RuntimeError."""
    @property
    def file(self) -> int:
        """Descriptor of the segment; valid until `ready`."""
    def attached(self) -> int:
        """Number of ranks that have mapped the segment."""
    def not_attached(self) -> list[int]:
        """Ranks that have not mapped the segment."""
    def wait_attached(self, seconds: float, /) -> None:
        """Wait until another rank has mapped the segment, or the time is over."""
    def ready(self) -> None:
        """Start the group, after all ranks have mapped the segment; closes the descriptor."""
    @property
    def copies(self) -> tuple[bool, bool, int | None]:
        """How memory is copied between ranks, known after `ready`.

        Single copies permitted; their way is learnt; if it is not, bytes from which on memory is
        copied once, None for never.
        """
    def set_eager_bytes(self, nbytes: int, /) -> None:
        """Make longer messages wait for their receive; 0: all; negative: the default."""
    def gone(self, rank: int, /) -> bool:
        """Return whether the process of `rank` has ended, or `rank` has left the group."""
    def pid_of(self, rank: int, /) -> int:
        """Return the process id of `rank`; 0 after `close`."""
    def set_error(self, error: Callable[[Outcome, int, float], BaseException], /) -> None:
        """Set the function that makes exceptions, from outcome, peer's process id and timeout."""
    def set_timeout(self, seconds: float, /) -> None:
        """Set how long an operation may wait for its peers."""
    def channel(self, index: int, /) -> Channel:
        """Return channel 0 or 1; it keeps the group alive."""
    def announce_group(self, members: int, async_op: bool, /) -> Outcome | Request | None:
        """Check that all ranks make the same group; `members` is a bit mask or a digest."""
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
        """Receive from `source`, -1 for any rank; returns an ended request if synchronous."""
    def flight(
        self,
    ) -> list[tuple[int, str, int, str, int, int, int, bool, int, int, int, str, int, str, int]]:
        """Return the last operations, oldest first.

        Each is: seq, op, dtype, reduction, nbytes, peer, tag, async, status (-1 while it runs),
        start and end in monotonic ns, file, line, function, channel.
        """
    def sender_of(self, tag: int, /) -> int:
        """Return the sender of the first message with `tag` that has no receive yet, or -1."""
    def host_shared_empty(self, nbytes: int, /) -> HeapMemory | Outcome:
        """Allocate memory in rank 0's heap that all ranks share; a collective."""
    def abort(self, detail: str, /) -> None:
        """Break the group for all ranks, for an external reason; no effect after `close`."""
    def failure(self) -> Outcome | None:
        """Return the outcome that broke the group; None if it is not broken."""
    def has_left(self, rank: int, /) -> bool:
        """Return whether `rank` has closed its group; True after `close`."""
    def close(self) -> None:
        """Leave the group; may be called twice, from any thread."""

def heap_allocate(bytes: int, zeroed: bool, copied: bool = False) -> HeapMemory | None:
    """Allocate in this process's heap; None if the host has no memory left.

    `copied`: whether forked children get a copy instead of sharing the memory.
    """

def not_copied_in_children() -> int:
    """Return the bytes of `copied` memory that a fork would share: too many to copy."""

def put_into_storage(memory: HeapMemory, storage: int, address: int, nbytes: int, /) -> bool:
    """Replace the memory of a small storage of torch by `memory`.

    `storage` is its `_cdata`; `address` and `nbytes` are its present memory. Returns False, without
    any effect, if the storage does not have the layout of this version of torch.
    """

class Ticket:
    """An event that a thread waits for in `Inbox.next`, and that another thread completes."""

    def __init__(self) -> None: ...
    @property
    def done(self) -> bool:
        """Whether it was completed."""

class Inbox:
    """Messages from the other processes of this host (csrc/core/inbox.h)."""

    def __init__(self) -> None: ...
    @property
    def offset(self) -> int:
        """Its offset in the heap."""
    def next(
        self, ticket: Ticket | None, seconds: float, asked: Outbox | None = None
    ) -> bytes | bool | None:
        """Return a message; True if the ticket is done; None at the timeout; False if closed.

        `asked` rings if what was sent through it, `patient`, is not read soon.
        """
    def complete(self, ticket: Ticket, /) -> None:
        """Complete a ticket, and wake the threads that wait for it."""
    def post(self, message: bytes, /) -> None:
        """Post a message to a thread that waits without a ticket."""
    def forget(self, pid: int, /) -> bool:
        """Free the ring of a process that has ended; False if it still has messages."""
    def close(self) -> None:
        """End all waits."""

class Outbox:
    """One ring of another process's inbox."""

    @staticmethod
    def claim(peer: Process, offset: int, /) -> Outbox | None:
        """Claim a ring of the inbox at `offset` of the peer's heap; None if all are in use."""
    def send(self, message: bytes, patient: bool = False) -> bool:
        """Send; False if the message does not fit now, or (above 16 KiB) can never fit.

        If `patient`, no thread is woken where another one will soon be back; the caller waits with
        `Inbox.next(..., asked=self)`, or calls `remind`.
        """
    def remind(self) -> None:
        """Wake a thread for what was sent and is not read yet."""

def heap_give(bytes: int, to: Process, address: int = 0) -> HeapMemory | None:
    """Allocate memory in this heap that belongs to the peer when this process releases it.

    The bytes at `address` are copied into it.
    """

def heap_share(nbytes: int, /) -> HeapMemory | None:
    """Allocate memory in this heap that other processes may hold, too."""

def heap_lend(address: int, to: Process | None) -> int:
    """Let a peer hold memory of `heap_share`; return the number of the hold, 0 for other memory."""

def heap_take(source: Process, offset: int, bytes: int, hold: int = 0) -> HeapMemory:
    """Hold memory that a peer has given, or lent with the number `hold`, until it is released."""

def heap_taken() -> int:
    """Return the bytes that this process holds of memory that peers have given."""

def heap_identity() -> tuple[int, int, int]:
    """Return process id, start time and heap descriptor, with which peers map the heap."""

def heap_peer(pid: int, start_time: int, descriptor: int, /) -> Process | None:
    """Map the heap of another process once; None if it has ended; raises OSError."""

def heap_offset(address: int, nbytes: int, /) -> int:
    """Return the offset of memory in this process's heap; -1 for other memory."""

def heap_trim() -> int:
    """Return the memory of freed blocks to the system; return the number of bytes."""

def heap_usage() -> tuple[int, int, int]:
    """Return bytes in use, bytes kept for new blocks, and the number of blocks."""

def change_word(
    memory: HeapMemory,
    index: int,
    before: int,
    after: int,
    peer: Process,
    seconds: float,
    /,
) -> int:
    """Wait until 32-bit word `index` is `before`, and set it to `after` atomically.

    Returns 0 if it was set, 1 after `seconds` (negative: no limit), 2 if `peer` has died.
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
    """Set torch's types, Dure's reductions and the hooks of `dure.trace`, for the `plain_` calls.

    `c` is torch._C, whose functions are used if torch's C++ functions are not found; `sample` is an
    empty tensor. The `plain_` calls return False while there are hooks.
    Returns False if torch does not have DLPack's exchange table: they then always return False.
    """

def pack_tensor(tensor: Tensor, most: int, needs_gradient: bool, /) -> bytes | None:
    """Return a plain tensor (dense, contiguous, not empty, of a real dtype, on the CPU) as bytes.

    The first byte is `needs_gradient`. None for other tensors, for those of more than `most` bytes,
    and for those in the symmetric heap.
    """

def unpack_tensor(packed: bytes, /) -> Tensor:
    """Return the tensor that `pack_tensor` has packed, in new memory.

    Raises:
        ValueError: The bytes are invalid.
    """

def set_library_folders(folders: list[tuple[str, bool]], /) -> None:
    """Set the folders of library files (`dure.trace.frames.library_folders`)."""

def call_site() -> str:
    """Return the call site in the user's program, as "file:line in function"."""

def crc32c(data: bytes | bytearray | memoryview, before: int = 0, /) -> int:
    """Return the CRC-32C of data that follows data with the sum `before`."""

def copy_bytes(to: bytearray | memoryview, source: bytes | bytearray | memoryview, /) -> None:
    """Copy bytes, bypassing the cache; raises ValueError if the lengths differ."""

def copy_from_file(
    descriptor: int, at: int, to: bytearray | memoryview, summed: bool, /
) -> tuple[int, int]:
    """Copy bytes of a file from byte `at` on, bypassing the cache; return number and CRC-32C.

    Copies fewer bytes if the file cannot be mapped, ends or fails; the caller reads the rest.
    """

class Subject:
    """The object of collectives, such as a module: ranks compare the code and show the text.

    The code is below 2^30; 0 for no subject.
    """

    def __init__(self, code: int, text: str, /) -> None: ...
    @property
    def code(self) -> int:
        """The code, which ranks compare."""
    @property
    def text(self) -> str:
        """The text for error messages."""

def set_subject(about: Subject, /) -> None:
    """Set the subject of the calling thread's collectives, until the next call."""

def subject() -> Subject:
    """Return the subject of the calling thread's collectives."""

protocol: int
"""`dure.version.PROTOCOL` of the sources of this build."""

def kernel_isa() -> str:
    """Return the instruction set of the kernels in use: generic, avx2 or avx512."""

def select_kernel_isa(isa: str, /) -> bool:
    """Select the kernels, for tests; False if this machine does not support them."""

def limit_isa(most: str, /) -> bool:
    """Select the best kernels up to these; False if the name is unknown."""

def reduce(out: int, sources: list[int], dtype: int, reduction: int, count: int, /) -> bool:
    """Run a kernel on `count` elements; False if the dtype does not support the reduction."""
