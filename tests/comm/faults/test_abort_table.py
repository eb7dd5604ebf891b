"""What the death and the silence of one rank mean to every operation, on every backend.

Three ranks form a group; then rank 1 goes wrong in one of the ways of `TABLE` where the others call
an operation. Each of the others must see the error of the table, with rank 1 named. What becomes of
calls that differ is in the conformance suite.

The whole matrix (failure x operation x synchronous or not x small or large x backend) is marked
slow; some of it, in which each failure, each operation and each backend occurs, runs always.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch

import dure
from dure.errors import CommError, CommTimeout, PeerLost
from tests.comm.forked_ranks import Ranks, Slot
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.needs("engine")

SIZE, CULPRIT = 3, 1
TIMEOUT_S = 0.5
SMALL, LARGE = 6, 300_000

# ---- the operations ------------------------------------------------------------------------------

COLLECTIVES = (
    *("barrier", "all_gather", "all_gather_single", "all_reduce", "all_to_all"),
    *("all_to_all_single", "broadcast", "gather", "reduce", "reduce_scatter"),
    *("reduce_scatter_single", "scatter"),
)
MESSAGES = ("recv", "send")
OBJECTS = ("all_gather_object", "broadcast_object_list")
ALL = sorted((*COLLECTIVES, *MESSAGES, *OBJECTS))


def call(case: Case, rank: int) -> None:
    """Call the operation of a case as one of its ranks, and wait for it."""
    count = LARGE if case.large else SMALL
    one, wide, whole = torch.ones(count), torch.ones(SIZE * count), torch.ones(SIZE * count)
    each, other = list(wide.split(count)), list(whole.split(count))
    at_root = each if rank == 0 else None
    peer = CULPRIT if rank == 0 else 0
    arguments: dict[str, Sequence[object]] = {
        "all_reduce": [one],
        "reduce": [one, 0],
        "broadcast": [one, 0],
        "all_gather": [each, one],
        "all_gather_single": [wide, one],
        "gather": [one, at_root, 0],
        "scatter": [one, at_root, 0],
        "reduce_scatter": [one, each],
        "reduce_scatter_single": [one, whole],
        "all_to_all": [each, other],
        "all_to_all_single": [wide, whole],
        "barrier": [],
        "send": [one, peer],
        "recv": [one, peer],
        "broadcast_object_list": [[{"rank": rank}], 0],
        "all_gather_object": [[None] * SIZE, {"rank": rank}],
    }
    if case.op in COLLECTIVES:
        work = getattr(dure, case.op)(*arguments[case.op], async_op=case.later)
    elif case.op in OBJECTS:
        work = getattr(dure, case.op)(*arguments[case.op])
    elif rank > 1:
        return  # it has no part in a message
    else:
        name = ("i" if case.later else "") + case.op
        work = getattr(dure, name)(*arguments[case.op])
    if case.later and work is not None:
        work.wait()


# ---- what must come of it ------------------------------------------------------------------------


ON_BACKENDS = {
    "shm": {},
    "gloo": {},
    "verified gloo": {"DURE_VERIFY": "1"},
    "hybrid": {"DURE_HOST_ID": "aab"},
    "hybrid, alone": {"DURE_HOST_ID": "aba"},
}
"""Backends, with the variables of their ranks; of one letter a rank each gets its own."""
DEATHS = {
    "killed": "signal 9 (SIGKILL)",
    "exits": "exit code 3",
    "crashes": "signal 11 (SIGSEGV)",
    "left": None,
}
"""How a rank ends, and what is said of it; of one that left its group, nothing."""
SILENCES = ("stopped", "absent", "all absent")
TABLE: dict[str, type[CommError]] = {
    **dict.fromkeys(DEATHS, PeerLost),
    **dict.fromkeys(SILENCES, CommTimeout),
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

        A small message is sent without its receiver. Gloo knows of a death only that a connection
        broke; verification is for collectives. Elsewhere than in shared memory the conformance
        suite has what is not about deaths.
        """
        if self.backend != "shm" and not (self.failure in DEATHS and self.op in COLLECTIVES):
            return False
        if self.op in OBJECTS or self.op == "barrier":
            return not self.large and not (self.later and self.op in OBJECTS)
        return self.op != "send" or self.large

    @property
    def breaks_the_group(self) -> bool:
        """Whether later calls say why; with Gloo they say what they find, such as a timeout."""
        return self.op not in MESSAGES and self.backend != "gloo"


MATRIX = [
    case
    for backend in ON_BACKENDS
    for failure in TABLE
    for op in ALL
    for later in (False, True)
    for large in (False, True)
    if (case := Case(failure, op, later, large, backend)).is_possible
]


def _always(case: Case) -> bool:
    """Choose what runs always: all failures of one operation, and one death of each other."""
    if case.backend != "shm":
        return (case.op, case.later, case.large) == ("all_reduce", False, False)
    if case.failure in SILENCES:
        return (case.op, case.later) in (("all_reduce", False), ("recv", False), ("barrier", True))
    if case.op == "all_reduce":
        return case.later == case.large
    turn = (list(DEATHS).index(case.failure) - ALL.index(case.op)) % len(DEATHS)
    return turn == 0 and case.large == (case.op == "send") and not case.later


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


def _rank(slot: Slot, case: Case) -> Seen | None:
    for name, value in ON_BACKENDS[case.backend].items():
        os.environ[name] = value[slot.rank % len(value)]
    backend = case.backend.removeprefix("verified ").removesuffix(", alone")
    slot.init(backend)
    try:
        dure.barrier()
        if case.failure in SILENCES:
            dure.group.WORLD.set_timeout(timedelta(seconds=TIMEOUT_S))
        if slot.rank == CULPRIT:
            return _goes_wrong(slot.rank, case.failure)
        if slot.rank > CULPRIT and case.failure == "all absent":
            return _waits_for_rank_0(slot.rank)
        if case.failure in ("absent", "all absent"):
            away = range(CULPRIT, SIZE if case.failure == "all absent" else CULPRIT + 1)
            dure.group.WORLD.store.wait([f"away/{rank}" for rank in away])
        began = time.monotonic()
        error = _error_of(lambda: call(case, slot.rank))
        took_s = time.monotonic() - began
        breaks = error is not None and case.breaks_the_group
        again = _error_of(dure.barrier) if breaks else None
        dure.group.WORLD.store.set(f"over/{slot.rank}", b"1")
        return Seen(error, again, took_s)
    finally:
        with suppress(CommError):
            dure.destroy_process_group()
        for name in ON_BACKENDS[case.backend]:
            del os.environ[name]


def _waits_for_rank_0(rank: int) -> None:
    """Stay away until rank 0 has seen it, however long that takes."""
    dure.group.WORLD.store.set(f"away/{rank}", b"1")
    dure.group.WORLD.store.wait(["over/0"], timedelta(seconds=PATIENCE_S))


def _goes_wrong(rank: int, failure: str) -> None:
    match failure:
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
            _waits_for_rank_0(rank)
        case _:
            pass  # it leaves


def _error_of(run: Callable[[], object]) -> BaseException | None:
    try:
        run()
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
    if (case.op, case.backend) == ("broadcast", "gloo"):
        return [0]  # the root sends to each by itself: rank 2 has all that it waits for
    return [0, 2]


@pytest.mark.parametrize("case", [_parameter(case) for case in MATRIX])
def test_failure_of_a_rank_of_3_is_what_the_table_says(ranks, case):
    pids = ranks.pids
    seen = ranks.run(_rank, SIZE, case)
    for rank in _concerned(case):
        mine = seen[rank]
        assert type(mine.error) is TABLE[case.failure], (rank, mine.error)
        assert mine.error.rank == rank
        assert mine.took_s < PATIENCE_S / 2
        if case.breaks_the_group:
            assert type(mine.again) is TABLE[case.failure], (rank, mine.again)
        if case.failure in SILENCES:
            _check_silence(case, mine.error, mine.took_s)
            continue
        if case.backend != "gloo":
            assert mine.error.peer == CULPRIT
        if case.backend == "shm":
            assert mine.error.pid == pids[CULPRIT]
            assert mine.error.exit in (None, DEATHS[case.failure])  # from Linux 6.15 on it is known


def _check_silence(case: Case, error: CommTimeout, took_s: float) -> None:
    """Who is missing is known exactly where one rank calls; of two that do, one may be late."""
    assert set(error.whereabouts) == set(error.missing)
    place = "stopped" if case.failure == "stopped" else "in _waits_for_rank_0"
    assert place in error.whereabouts[CULPRIT]
    if case.op in MESSAGES or case.failure == "all absent":
        assert error.missing == ((CULPRIT,) if case.op in MESSAGES else (1, 2))
        assert took_s >= TIMEOUT_S


def test_table_covers_every_operation():
    assert {case.op for case in MATRIX} == set(ALL)
    assert {case.op for case in MATRIX if _always(case)} == set(ALL)
    assert {case.failure for case in MATRIX if _always(case)} == set(TABLE)
    assert {case.backend for case in MATRIX if _always(case)} == set(ON_BACKENDS)
