"""What the extension offers; csrc/bindings has one file a class.

Addresses and byte counts are plain integers. `dtype`, `reduction` and `op` are the codes of
csrc/core/types.h. A call that can be asynchronous returns None when it is done, an `Outcome` when
it failed, or a `Ticket` where ``async_op`` is true.
"""

class Outcome:
    """How an operation failed."""

    @property
    def status(self) -> int:
        """A member of `dure.native.status.Status`."""
    @property
    def op(self) -> str:
        """The operation that failed, or that the group broke in."""
    @property
    def seq(self) -> int:
        """Number of the collective in its group; 0 for point-to-point."""
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

class Ticket:
    """A pending operation; any thread may ask at any time."""

    @property
    def source(self) -> int:
        """Sender of a finished receive, or -1."""
    @property
    def outcome(self) -> Outcome | None:
        """None while pending and after success."""
    def done(self) -> bool:
        """Tell whether the operation ended."""
    def wait(self, seconds: float = -1.0) -> bool:
        """Wait, at most `seconds` if not negative; tell whether it ended."""

class SharedBlock:
    """This rank's region of an arena file; a writable buffer that keeps the memory alive."""

    @property
    def id(self) -> int:
        """Number of the file, equal on all ranks."""
    @property
    def bytes(self) -> int:
        """Length of the region."""
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Group:
    """This rank's end of a shared segment, with its two threads (csrc/core/group.h)."""

    @staticmethod
    def create(rank: int, size: int, timeout_s: float, cores: int, nonce: int, /) -> Group:
        """Make the segment; OSError where the system refuses."""
    @staticmethod
    def attach(
        rank: int, size: int, timeout_s: float, cores: int, pid: int, fd: int, nonce: int, /
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
    def gone(self, rank: int, /) -> bool:
        """Tell whether the process of `rank` has ended, or `rank` has left the group."""
    def pid_of(self, rank: int, /) -> int:
        """Process of `rank`; 0 after `close`."""
    def set_timeout(self, seconds: float, /) -> None:
        """Change how long an operation may wait for its peers."""
    def run(
        self,
        op: int,
        dtype: int,
        reduction: int,
        root: int,
        inputs: list[int],
        outputs: list[int],
        async_op: bool,
        /,
    ) -> Outcome | Ticket | None:
        """Run any collective; a list holds address, length, address, length..."""
    def send(
        self, data: int, nbytes: int, dtype: int, to: int, tag: int, async_op: bool, /
    ) -> Outcome | Ticket | None:
        """Send to rank `to`."""
    def receive(
        self, data: int, nbytes: int, dtype: int, source: int, tag: int, async_op: bool, /
    ) -> Ticket:
        """Receive from `source`, -1 for anyone; a finished ticket where not asynchronous."""
    def plain_all_reduce(self, tensor: object, op: object, /) -> bool | Outcome:
        """Reduce a plain tensor; False where it is not plain and nothing was done."""
    def plain_broadcast(self, tensor: object, root: int, /) -> bool | Outcome:
        """Broadcast a plain tensor."""
    def plain_all_gather(self, output: object, tensor: object, /) -> bool | Outcome:
        """Gather plain tensors into one that is n times as long."""
    def plain_reduce_scatter(self, output: object, tensor: object, op: object, /) -> bool | Outcome:
        """Reduce part i of a plain tensor into rank i's."""
    def plain_all_to_all(self, output: object, tensor: object, /) -> bool | Outcome:
        """Exchange equal parts of plain tensors."""
    def plain_barrier(self) -> bool | Outcome:
        """Meet."""
    def plain_send(self, tensor: object, to: int, tag: int, /) -> bool | Outcome:
        """Send a plain tensor."""
    def plain_receive(self, tensor: object, source: int, tag: int, /) -> bool | Outcome:
        """Receive into a plain tensor."""
    def flight(
        self,
    ) -> list[tuple[int, str, int, str, int, int, int, bool, int, int, int, str, int, str]]:
        """Return the last operations, oldest first.

        Each is: seq, op, dtype, reduction, nbytes, peer, tag, async, status (-1 while it runs),
        start and end in monotonic ns, file, line, function.
        """
    def sender_of(self, tag: int, /) -> int:
        """Return who sent the first message with `tag` that awaits its receive; -1 if none did."""
    def shared_empty(self, nbytes: int, /) -> SharedBlock | Outcome:
        """Allocate in the arena, a region for each rank; a collective."""
    def host_shared_empty(self, nbytes: int, /) -> SharedBlock | Outcome:
        """Allocate in the arena, one region that all ranks have; a collective."""
    def condemn(self, detail: str, /) -> None:
        """Break the group for all ranks, for a reason outside it; nothing after `close`."""
    def failure(self) -> Outcome | None:
        """Return what the group is broken by."""
    def has_left(self, rank: int, /) -> bool:
        """Tell whether `rank` closed its group; True after `close`."""
    def close(self) -> None:
        """Leave; safe to call twice, from any thread."""

def know_torch(tensor: type, parameter: type, reductions: list[object], /) -> bool:
    """Learn torch's types and our reductions, for the `plain_` calls.

    False where torch lacks DLPack's exchange table: they then decline everything.
    """

def set_library_folders(folders: list[str], /) -> None:
    """Say whose frames are not the user's (paths' beginnings)."""

def call_site() -> str:
    """Return the place of the user's program that calls, as "file:line in function"."""

def kernel_isa() -> str:
    """Return the instruction set of the kernels in use: generic, avx2 or avx512."""

def select_kernel_isa(isa: str, /) -> bool:
    """Use other kernels from now on (for tests); False where this machine cannot."""

def reduce(out: int, sources: list[int], dtype: int, reduction: int, count: int, /) -> bool:
    """Run one kernel on `count` elements; False where the reduction has no meaning."""
