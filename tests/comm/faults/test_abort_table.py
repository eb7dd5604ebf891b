"""What every failure of one rank means to every operation, on every backend: `TABLE` says it.

Three ranks form a group; then rank 1 goes wrong in one of the ways of `TABLE` where the others call
an operation. Each of the others must see the outcome of the table, with rank 1 named; where ranks
disagree all three must, and no rank's tensors may have changed.

The whole matrix (failure x operation x synchronous or not x small or large x backend) is marked
slow; some of it, in which each failure, each operation and each backend occurs, runs always.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest
import torch

import dure
from dure.errors import CommError, CommTimeout, Desync, PeerLost
from tests.comm.forked_ranks import Ranks, Slot
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.needs("engine")

SIZE, CULPRIT = 3, 1
TIMEOUT_S = 0.5
SMALL, LARGE = 6, 300_000

# ---- the operations, and what of a call can be wrong on one rank ---------------------------------

ROOTED = ("reduce", "broadcast", "gather", "scatter")
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single")
WITH_DATA = (
    *("all_gather", "all_gather_single", "all_reduce", "all_to_all", "all_to_all_single"),
    *("broadcast", "gather", "reduce", "reduce_scatter", "reduce_scatter_single", "scatter"),
)
COLLECTIVES = ("barrier", *WITH_DATA)
MESSAGES = ("recv", "send")
OBJECTS = ("all_gather_object", "broadcast_object_list")
LISTS = ("all_gather", "all_to_all", "reduce_scatter")
ALL = sorted((*COLLECTIVES, *MESSAGES, *OBJECTS))


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a rank calls an operation with."""

    rank: int
    count: int
    dtype: torch.dtype = torch.float32
    root: int = 0
    reduction: Any = dure.ReduceOp.SUM
    last: int = 0  # elements that the last of several tensors has beyond the others

    def tensor(self, times: int = 1, more: int = 0) -> torch.Tensor:
        return torch.full((times * self.count + more,), self.rank + 1, dtype=self.dtype)

    def tensors(self) -> list[torch.Tensor]:
        return [self.tensor(), self.tensor(), self.tensor(more=self.last)]


WRONG: dict[str, Callable[[Arguments], Arguments]] = {
    "dtype": lambda a: replace(a, dtype=torch.int32),
    "count": lambda a: replace(a, count=a.count + 1),
    "length": lambda a: replace(a, last=1),
    "root": lambda a: replace(a, root=1),
    "reduction": lambda a: replace(a, reduction=dure.ReduceOp.MAX),
}
"""One argument that is another on one rank."""


def make_call(op: str, a: Arguments, later: bool) -> tuple[list[torch.Tensor], Callable[[], Any]]:
    """Return the tensors that an operation may change, and what calls it and waits for it."""
    one, each, other = a.tensor(), a.tensors(), a.tensors()
    wide, whole = a.tensor(SIZE), a.tensor(SIZE)
    at_root = each if a.rank == a.root else None
    changed_and_given: dict[str, tuple[list[torch.Tensor], tuple[object, ...]]] = {
        "all_reduce": ([one], (one, a.reduction)),
        "reduce": ([one], (one, a.root, a.reduction)),
        "broadcast": ([one], (one, a.root)),
        "all_gather": (each, (each, one)),
        "all_gather_single": ([wide], (wide, one)),
        "gather": (at_root or [], (one, at_root, a.root)),
        "scatter": ([one], (one, at_root, a.root)),
        "reduce_scatter": ([one], (one, each, a.reduction)),
        "reduce_scatter_single": ([one], (one, whole, a.reduction)),
        "all_to_all": (each, (each, other)),
        "all_to_all_single": ([wide], (wide, whole)),
        "barrier": ([], ()),
        "send": ([one], (one, CULPRIT if a.rank == 0 else 0)),
        "recv": ([one], (one, CULPRIT if a.rank == 0 else 0)),
        "broadcast_object_list": ([], ([{"rank": a.rank}], a.root)),
        "all_gather_object": ([], ([None] * SIZE, {"rank": a.rank})),
    }
    changed, given = changed_and_given[op]

    def call() -> None:
        if op in COLLECTIVES:
            work = getattr(dure, op)(*given, async_op=later)
        elif op in OBJECTS:
            work = getattr(dure, op)(*given)
        elif a.rank > 1:
            return  # it has no part in a message
        else:
            sends = (op == "send") == (a.rank == 0)
            name = ("i" if later else "") + ("send" if sends else "recv")
            work = getattr(dure, name)(*given)
        if later and work is not None:
            work.wait()

    return changed, call


# ---- what must come of it ------------------------------------------------------------------------


ON_BACKENDS = {
    "shm": {},
    "gloo": {},
    "verified gloo": {"DURE_VERIFY": "1"},
    "hybrid": {"DURE_HOST_ID": "aab"},
    "hybrid, alone": {"DURE_HOST_ID": "aba"},
}
"""Backends, with the variables of their ranks; of one letter a rank each gets its own."""
DEATHS = ("killed", "exits", "crashes", "left")
SILENCES = ("stopped", "absent", "all absent")


@dataclass(frozen=True, slots=True)
class Expected:
    """What the other ranks see: an error of which type, at which operations."""

    error: type[CommError]
    ops: tuple[str, ...]


TABLE = {
    **{failure: Expected(PeerLost, tuple(ALL)) for failure in DEATHS},
    **{failure: Expected(CommTimeout, tuple(ALL)) for failure in SILENCES},
    "op": Expected(Desync, COLLECTIVES),
    "async": Expected(Desync, COLLECTIVES),
    "dtype": Expected(Desync, (*WITH_DATA, "recv")),
    "count": Expected(Desync, (*WITH_DATA, "recv")),
    "length": Expected(Desync, LISTS),
    "root": Expected(Desync, ROOTED),
    "reduction": Expected(Desync, REDUCING),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One cell of the matrix."""

    failure: str
    op: str
    later: bool = False
    large: bool = False
    backend: str = "shm"

    def __str__(self) -> str:
        how = "async" if self.later else "sync"
        size = "large" if self.large else "small"
        return "-".join((self.failure, self.op, how, size, self.backend)).removesuffix("-shm")

    @property
    def is_possible(self) -> bool:
        """Whether it has one outcome only.

        A small message is sent without its receiver; one that does not fit and is large keeps its
        sender waiting for a receive that does. Gloo compares nothing, and knows of a death only
        that a connection broke; verification is for collectives. Elsewhere than in shared memory
        the conformance suite has what is not about deaths.
        """
        if self.backend != "shm" and not (self.failure in DEATHS and self.op in COLLECTIVES):
            return False
        if self.op in OBJECTS or self.op == "barrier":
            return not self.large and not (self.later and self.op in OBJECTS)
        if self.op == "send":
            return self.large
        return not (self.op == "recv" and self.large and self.failure in WRONG)

    @property
    def breaks_the_group(self) -> bool:
        """Whether later calls say why; with Gloo they say what they find, such as a timeout."""
        return self.op not in MESSAGES and self.backend != "gloo"


MATRIX = [
    case
    for backend in ON_BACKENDS
    for failure, expected in TABLE.items()
    for op in sorted(expected.ops)
    for later in (False, True)
    for large in (False, True)
    if (case := Case(failure, op, later, large, backend)).is_possible
]


def _always(case: Case) -> bool:
    """Choose what runs always: all failures of one operation, and two of each other."""
    if case.backend != "shm":
        return (case.op, case.later, case.large) == ("all_reduce", False, False)
    if case.failure in SILENCES:
        return (case.op, case.later) in (("all_reduce", False), ("recv", False), ("barrier", True))
    if case.op == "all_reduce":
        return case.later == case.large
    if case.failure == "length":
        return not case.large
    quick = [f for f, e in TABLE.items() if e.error is not CommTimeout and case.op in e.ops]
    turn = (quick.index(case.failure) - ALL.index(case.op)) % len(quick)
    return turn < 2 and case.large == (case.op == "send") and not case.later


def _parameter(case: Case):
    marks = () if _always(case) else (pytest.mark.slow,)
    return pytest.param(case, id=str(case), marks=marks)


# ---- on the ranks --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seen:
    """What a rank saw; `again` is what the next call of a broken group raises."""

    error: BaseException | None
    again: BaseException | None
    took_s: float
    unchanged: bool


def _rank(slot: Slot, case: Case) -> Seen | None:
    for name, value in ON_BACKENDS[case.backend].items():
        os.environ[name] = value[slot.rank % len(value)]
    backend = case.backend.removeprefix("verified ").removesuffix(", alone")
    dure.init_process_group(
        backend, slot.url, timedelta(seconds=PATIENCE_S), world_size=slot.size, rank=slot.rank
    )
    try:
        dure.barrier()
        if case.failure in SILENCES:
            dure.group.WORLD.set_timeout(timedelta(seconds=TIMEOUT_S))
        if slot.rank == CULPRIT and case.failure not in WRONG:
            return _goes_wrong(slot, case)
        if slot.rank > CULPRIT and case.failure == "all absent":
            return _waits_for_rank_0()
        arguments = Arguments(slot.rank, LARGE if case.large else SMALL)
        if slot.rank == CULPRIT:
            arguments = WRONG[case.failure](arguments)
        seen = _watched(case.op, arguments, case.later, case.breaks_the_group)
        dure.group.WORLD.store.set(f"over/{slot.rank}", b"1")
        return seen
    finally:
        with suppress(CommError):
            dure.destroy_process_group()
        for name in ON_BACKENDS[case.backend]:
            del os.environ[name]


def _waits_for_rank_0() -> None:
    """Stay away until rank 0 has seen it, however long that takes."""
    dure.group.WORLD.store.wait(["over/0"], timedelta(seconds=PATIENCE_S))


def _goes_wrong(slot: Slot, case: Case) -> Seen | None:
    arguments = Arguments(slot.rank, LARGE if case.large else SMALL)
    match case.failure:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "crashes":
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exits":
            os._exit(3)
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "absent" | "all absent":
            _waits_for_rank_0()
        case "op" | "async":
            other = "all_reduce" if case.op == "barrier" else "barrier"
            return _watched(other, arguments, case.later != (case.failure == "async"), True)
        case _:
            pass  # it leaves
    return None


def _watched(op: str, arguments: Arguments, later: bool, calls_again: bool) -> Seen:
    tensors, call = make_call(op, arguments, later)
    before = [t.clone() for t in tensors]
    began = time.monotonic()
    error = _error_of(call)
    took_s = time.monotonic() - began
    again = _error_of(dure.barrier) if error is not None and calls_again else None
    unchanged = all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))
    return Seen(error, again, took_s, unchanged)


def _error_of(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except BaseException as error:
        return error
    return None


# ---- the drill -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Iterator[Ranks]:
    with Ranks(SIZE, tmp_path_factory.mktemp("drill")) as made:
        yield made


def _concerned(case: Case) -> list[int]:
    if case.op in MESSAGES or case.failure == "all absent":
        return [0]
    if (case.op, case.backend) == ("broadcast", "gloo") and case.failure in DEATHS:
        return [0]  # the root sends to each by itself: rank 2 has all that it waits for
    return [0, 1, 2] if TABLE[case.failure].error is Desync else [0, 2]


@pytest.mark.parametrize("case", [_parameter(case) for case in MATRIX])
def test_failure_of_a_rank_of_3_is_what_the_table_says(ranks, case):
    expected = TABLE[case.failure]
    pids = ranks.pids
    seen = ranks.run(_rank, SIZE, case)
    for rank in _concerned(case):
        mine = seen[rank]
        assert type(mine.error) is expected.error, (rank, mine.error)
        assert mine.error.rank == rank
        if case.breaks_the_group:
            assert type(mine.again) is expected.error, (rank, mine.again)
        match mine.error:
            case PeerLost() as error:
                if case.backend != "gloo":
                    assert error.peer == CULPRIT
                if case.backend == "shm":
                    assert error.pid == pids[CULPRIT]
                assert mine.took_s < PATIENCE_S / 2
            case CommTimeout() as error:
                _check_silence(case, error, mine.took_s)
            case error:
                assert isinstance(error, Desync)
                concerned = (0, 1) if case.op in MESSAGES else range(SIZE)
                assert set(error.calls) == set(concerned)
                assert error.calls[0] != error.calls[CULPRIT]
                assert case.op in MESSAGES or error.op == error.calls[rank].partition("(")[0]
                assert mine.unchanged
                assert mine.took_s < PATIENCE_S / 2


def _check_silence(case: Case, error: CommTimeout, took_s: float) -> None:
    """Who is missing is known exactly where one rank calls; of two that do, one may be late."""
    assert set(error.whereabouts) == set(error.missing)
    assert took_s < PATIENCE_S / 2
    if case.op in MESSAGES or case.failure == "all absent":
        assert error.missing == ((CULPRIT,) if case.op in MESSAGES else (1, 2))
        assert took_s >= TIMEOUT_S
    else:
        assert CULPRIT in error.missing


def test_table_covers_every_operation():
    assert {case.op for case in MATRIX} == set(ALL)
    assert {case.op for case in MATRIX if _always(case)} == set(ALL)
    assert {case.failure for case in MATRIX if _always(case)} == set(TABLE)
    assert {case.backend for case in MATRIX if _always(case)} == set(ON_BACKENDS)
