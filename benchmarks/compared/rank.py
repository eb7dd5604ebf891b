"""What a rank of a comparison runs: it joins its group, then obeys the controller.

    python rank.py ADDRESS dure BACKEND | torch BACKEND | mpi

ADDRESS is the name of the controller's socket in the abstract namespace. The rank says who it is,
then answers commands, dictionaries each way: `prepare` (make the buffers, run and check once),
`sample` (time k operations back to back), `finish` (check again, let the buffers go). Between
commands it sleeps in a read of that socket and costs nothing.

A rank of MPI may run on another Python, which has mpi4py and numpy but neither torch nor Dure. So
this file needs the standard library alone, until it knows whom it plays.

Values. Whole numbers that every element type holds exactly, and so are their sums:

- *moved*: element i of rank r's buffer is 1 + (i + 17 r) mod 113.
- *reduced*: 1 + (i + r) mod 5; for avg that times the number of ranks; for product, 2 where
  i mod n = r and else 1.

All are periodic in i, so a period is computed and repeated. Shifted by a chunk, swapped between
ranks, or with a rank left out, the result is another one.
"""

from __future__ import annotations

import math
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

# Any: buffers are tensors or numpy arrays, and what moves them one of three libraries.
from typing import Any

_MOVED_PERIOD, _MOVED_SHIFT, _REDUCED_PERIOD = 113, 17, 5
_FOLDS: dict[str, Callable[[Sequence[int]], int]] = {
    "sum": sum,
    "avg": lambda values: sum(values) // len(values),
    "min": min,
    "max": max,
    "product": math.prod,
}
Run = Callable[[int], object]


class Refusal(Exception):
    """This contestant does not offer what is asked; all its ranks say so, without communicating."""


@dataclass(frozen=True)
class Case:
    """One cell on one rank; `count` as `dure.cli.bench.operations` says."""

    op: str
    dtype: str
    redop: str
    count: int
    arena: bool
    rank: int
    size: int

    @property
    def part(self) -> int:
        return self.count // self.size

    @property
    def checked_root(self) -> int:
        return self.size - 1

    def root_of(self, turn: int) -> int:
        """Return the root of operation number `turn`: with turns, no rank runs ahead."""
        return turn % self.size


@dataclass(frozen=True)
class Segment:
    """`length` elements that `owner` holds (None: reduced over all), from its element `start`."""

    length: int
    owner: int | None
    start: int = 0


def inputs(case: Case) -> Segment:
    """Return what this rank's source holds before the operation."""
    short = case.op in {"all_gather", "gather"}
    return Segment(case.part if short else case.count, case.rank)


def expected(case: Case) -> list[Segment]:
    """Return what this rank must hold after it; nothing where the operation leaves it open."""
    rank, root, part, count = case.rank, case.checked_root, case.part, case.count
    if case.op == "all_reduce" or (case.op == "reduce" and rank == root):
        return [Segment(count, None)]
    if case.op == "broadcast":
        return [Segment(count, root)]
    if case.op == "all_gather" or (case.op == "gather" and rank == root):
        return [Segment(part, owner) for owner in range(case.size)]
    if case.op == "reduce_scatter":
        return [Segment(part, None, rank * part)]
    if case.op == "all_to_all":
        return [Segment(part, owner, rank * part) for owner in range(case.size)]
    if case.op == "scatter":
        return [Segment(part, root, rank * part)]
    if case.op == "sendrecv" and rank < 2:
        return [Segment(count, 1 - rank)]
    return []


def period(case: Case, segment: Segment) -> list[int]:
    """Return the first elements of a segment, which repeat."""
    if case.redop == "":
        length = _MOVED_PERIOD
    else:
        length = case.size if case.redop == "product" else _REDUCED_PERIOD
    at = range(segment.start, segment.start + length)
    if segment.owner is not None:
        return [_value(case, segment.owner, i) for i in at]
    fold = _FOLDS[case.redop]
    return [fold([_value(case, rank, i) for rank in range(case.size)]) for i in at]


def _value(case: Case, rank: int, i: int) -> int:
    """Return element `i` of what `rank` holds before the operation."""
    if case.redop == "":
        return 1 + (i + _MOVED_SHIFT * rank) % _MOVED_PERIOD
    if case.redop == "product":
        return 2 if i % case.size == rank else 1
    return (1 + (i + rank) % _REDUCED_PERIOD) * (case.size if case.redop == "avg" else 1)


class TorchStyle:
    """Dure, or torch.distributed: the same names."""

    def __init__(self, module: str, backend: str) -> None:
        import torch  # lazy: a rank of MPI has none

        if module == "dure":
            import dure as dist  # lazy: as above
        else:
            import torch.distributed as dist  # lazy: as above; the rival, not our engine
        torch.set_num_threads(1)
        self._torch: Any = torch
        self._dist: Any = dist
        dist.init_process_group(backend)
        self.rank, self.size = int(dist.get_rank()), int(dist.get_world_size())
        self.label = f"dure {dist.get_backend()}" if module == "dure" else backend
        self.version = f"torch {torch.__version__}"
        group: Any = dist.group.WORLD
        self.copies = str(getattr(group, "copies", None) or "")
        self.barrier: Any = dist.barrier
        self.leave: Any = dist.destroy_process_group

    def empty(self, count: int, case: Case) -> Any:
        make: Any = self._dist.shared_empty if case.arena else self._torch.empty
        return make(count, dtype=getattr(self._torch, case.dtype))

    def filled(self, values: list[int], length: int, case: Case) -> Any:
        once = self._torch.tensor(values).to(getattr(self._torch, case.dtype))
        return once.repeat(-(-length // len(values)))[:length]

    def operation(self, case: Case, a: Any, b: Any) -> Run:
        """Return a function that runs the operation once, on source `a` and target `b`."""
        dist, root = self._dist, case.root_of
        redop = getattr(dist.ReduceOp, case.redop.upper()) if case.redop else None
        # Under their names of today or, in an older torch, of yesterday.
        new = hasattr(dist, "all_gather_single")
        all_gather = dist.all_gather_single if new else dist.all_gather_into_tensor
        reduce_scatter = dist.reduce_scatter_single if new else dist.reduce_scatter_tensor
        whole = {"gather": b, "scatter": a}.get(case.op)
        parts = None if whole is None else list(whole.split(case.part))

        def mine(turn: int) -> Any:
            return parts if root(turn) == case.rank else None

        runs: dict[str, Run] = {
            "all_reduce": lambda turn: dist.all_reduce(a, redop),
            "broadcast": lambda turn: dist.broadcast(a, root(turn)),
            "reduce": lambda turn: dist.reduce(a, root(turn), redop),
            "all_gather": lambda turn: all_gather(b, a),
            "reduce_scatter": lambda turn: reduce_scatter(b, a, redop),
            "all_to_all": lambda turn: dist.all_to_all_single(b, a),
            "gather": lambda turn: dist.gather(a, mine(turn), root(turn)),
            "scatter": lambda turn: dist.scatter(b, mine(turn), root(turn)),
            "barrier": lambda turn: dist.barrier(),
            "sendrecv": _ping_pong(case, lambda to: dist.send(a, to), lambda r: dist.recv(b, r)),
        }
        return runs[case.op]


class Mpi:
    def __init__(self) -> None:
        import numpy  # lazy: ranks of torch do without
        from mpi4py import MPI  # pyright: ignore[reportMissingImports] # lazy: an optional rival

        self._numpy: Any = numpy
        self._mpi: Any = MPI
        self._comm: Any = self._mpi.COMM_WORLD
        self.rank, self.size = int(self._comm.Get_rank()), int(self._comm.Get_size())
        text = " ".join(str(self._mpi.Get_library_version()).split())
        self.version = text.partition(",")[0].partition(" Release")[0]
        names = {"Open MPI": "Open MPI", "Intel(R) MPI": "Intel MPI", "MPICH": "MPICH"}
        self.label = next((short for name, short in names.items() if name in text), "MPI")
        self.barrier: Any = self._comm.Barrier
        self.leave: Any = self._mpi.Finalize

    def empty(self, count: int, case: Case) -> Any:
        if case.dtype in {"float16", "bfloat16"}:
            raise Refusal(f"MPI has no {case.dtype}")
        return self._numpy.empty(count, case.dtype)

    def filled(self, values: list[int], length: int, case: Case) -> Any:
        return self._numpy.resize(self._numpy.array(values).astype(case.dtype), length)

    def operation(self, case: Case, a: Any, b: Any) -> Run:
        comm, in_place, root = self._comm, self._mpi.IN_PLACE, case.root_of
        if case.redop == "avg":
            raise Refusal("MPI has no avg")
        names = {"sum": "SUM", "product": "PROD", "min": "MIN", "max": "MAX"}
        redop = getattr(self._mpi, names[case.redop]) if case.redop else None

        def reduce(turn: int) -> None:
            mine = (in_place, a) if root(turn) == case.rank else (a, None)
            comm.Reduce(*mine, redop, root(turn))

        runs: dict[str, Run] = {
            "all_reduce": lambda turn: comm.Allreduce(in_place, a, redop),
            "broadcast": lambda turn: comm.Bcast(a, root(turn)),
            "reduce": reduce,
            "all_gather": lambda turn: comm.Allgather(a, b),
            "reduce_scatter": lambda turn: comm.Reduce_scatter_block(a, b, redop),
            "all_to_all": lambda turn: comm.Alltoall(a, b),
            "gather": lambda turn: comm.Gather(a, b, root(turn)),
            "scatter": lambda turn: comm.Scatter(a, b, root(turn)),
            "barrier": lambda turn: comm.Barrier(),
            "sendrecv": _ping_pong(case, lambda to: comm.Send(a, to), lambda r: comm.Recv(b, r)),
        }
        return runs[case.op]


def _ping_pong(case: Case, send: Run, receive: Run) -> Run:
    """Return a round trip between ranks 0 and 1; the others look on."""

    def zero(turn: int) -> None:
        send(1)
        receive(1)

    def one(turn: int) -> None:
        receive(0)
        send(0)

    return (zero, one, lambda turn: None)[min(case.rank, 2)]


class Server:
    def __init__(self, contestant: TorchStyle | Mpi) -> None:
        self._contestant = contestant
        self._case: Case
        self._source: Any = None
        self._target: Any = None
        self._run: Run

    def prepare(self, **asked: Any) -> dict[str, int]:
        """Make the buffers, run the operation once, and count wrong elements."""
        who = self._contestant
        case = Case(**asked, rank=who.rank, size=who.size)
        self._case = case
        if case.op != "barrier":
            self._source = who.empty(inputs(case).length, case)
            lengths = {
                **dict.fromkeys(("all_gather", "all_to_all", "gather", "sendrecv"), case.count),
                **dict.fromkeys(("reduce_scatter", "scatter"), case.part),
            }  # the others receive where they send from
            self._target = who.empty(lengths[case.op], case) if case.op in lengths else None
        self._run = who.operation(case, self._source, self._target)
        found = self._check()
        if case.op in {"all_reduce", "reduce"}:
            self._source[:] = 0  # in place, again and again: zeros stay what they are
        return {"wrong": found}

    def sample(self, repeats: int) -> dict[str, float]:
        """Return the seconds of one operation, of `repeats` back to back; of half a round trip."""
        run = self._run
        messages = 2 if self._case.op == "sendrecv" else 1
        self._contestant.barrier()
        start = time.perf_counter()
        for turn in range(repeats):
            run(turn)
        return {"seconds": (time.perf_counter() - start) / repeats / messages}

    def finish(self) -> dict[str, int]:
        """Check once more, while everything is warm, and let the buffers go."""
        found = self._check()
        del self._run
        self._source = self._target = None
        return {"wrong": found}

    def _check(self) -> int:
        """Run the operation once on fresh values and count the elements that come out wrong."""
        case, who = self._case, self._contestant
        if case.op == "barrier":
            self._run(0)
            return 0
        mine = inputs(case)
        self._source[:] = who.filled(period(case, mine), mine.length, case)
        result = self._source if self._target is None else self._target
        if self._target is not None:
            self._target[:] = 0
        self._run(case.checked_root)
        found = at = 0
        for segment in expected(case):
            wanted = who.filled(period(case, segment), segment.length, case)
            found += int((result[at : at + segment.length] != wanted).sum())
            at += segment.length
        return found


def serve(address: str, who: Any, server: object) -> None:
    """Answer commands until the controller says no more.

    Args:
        address: Name of the controller's socket.
        who: Has the rank, label and version of who answers (Any: of whatever library).
        server: Its methods are the commands; they take keywords, and return what to answer.
    """
    with socket.socket(socket.AF_UNIX) as own:
        own.connect("\0" + address)
        controller = Connection(own.detach())
    who_answers = {name: getattr(who, name) for name in ("rank", "label", "version")}
    controller.send({**who_answers, "copies": getattr(who, "copies", "")})
    while True:
        try:
            command = controller.recv()
        except (EOFError, OSError):  # it has no more
            return
        try:
            answer = getattr(server, command.pop("command"))(**command)
        except Refusal as refusal:
            answer = {"refused": str(refusal)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        controller.send(answer)


def main() -> None:
    address, kind, *rest = sys.argv[1:]
    who = Mpi() if kind == "mpi" else TorchStyle(kind, rest[0])
    serve(address, who, Server(who))
    who.leave()


if __name__ == "__main__":
    main()
