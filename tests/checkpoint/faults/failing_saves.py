"""Saves of which one call fails: every writer of the package, run in forked ranks and checked.

`main` serves `run(scenario, ...)` in a process that has preloaded `failing_calls.c`. It imports
torch once, and all ranks of all saves are forked from it.

A *scenario* is a writer, a number of ranks, and the folder before the save: fresh, used (with a
checkpoint of number 1), or left (used, then a save was killed in it). A *case* is one fault in that
save: in a rank, at a call, of a kind. The save is of number 2. After it:

* the folder has number 2, or what it had before the save; all elements are of one of them;
* if a rank reported success, it is number 2; if one raised, all raised, each an error of Dure;
* a save for which a write or a flush failed is not reported as a success;
* a save of number 3 works, and leaves as many files as one without a fault;
* other files in the folder are as they were.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import importlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

import dure
from dure.checkpoint import (
    Checkpointer,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    async_save,
    load,
    save,
)
from dure.checkpoint.planner import DefaultSavePlanner
from dure.errors import CheckpointError, DureError
from dure.tensor import Shard, distribute_tensor, init_device_mesh
from tests.waiting import PATIENCE_S

OLD, NEW, NEXT = 1, 2, 3
SHAPE = (6, 4)
BESIDE = {"notes.txt": b"a line", "logs/events": b"\x00\x01"}  # other files in the folder


# ---- what is saved, and how it is read -----------------------------------------------------------


def _whole(name: str, number: int) -> torch.Tensor:
    begin = 1000 * number + (100 if name == "columns" else 0)
    return begin + torch.arange(24.0).reshape(SHAPE)


def _tensors(number: int) -> dict[str, Any]:
    """Return tensors of which ranks have rows, or columns, or all."""
    if not dure.is_initialized():
        return {name: _whole(name, number) for name in ("rows", "columns", "shared")}
    mesh = init_device_mesh("cpu", (dure.get_world_size(),))
    return {
        "rows": distribute_tensor(_whole("rows", number), mesh, [Shard(0)]),
        "columns": distribute_tensor(_whole("columns", number), mesh, [Shard(1)]),
        "shared": _whole("shared", number),
    }


def _read(folder: Path, **options: Any) -> int | None:
    """Return the number of what is loaded; None: there is nothing.

    Raises:
        AssertionError: It is not all of one number.
    """
    state = {name: torch.zeros(SHAPE) for name in ("rows", "columns", "shared")}
    try:
        load(state, no_dist=True, **options)
    except CheckpointError as e:
        if "there is no " in str(e) or "there are no weights" in str(e):
            return None
        raise
    return _number_of(state)


def _number_of(state: dict[str, torch.Tensor]) -> int:
    """Return the number of which all tensors are."""
    number = int(state["rows"][0, 0]) // 1000
    for name, tensor in state.items():
        assert tensor.equal(_whole(name, number)), f"{name} is not of number {number}: {tensor}"
    return number


class _Planner(DefaultSavePlanner):
    """A planner of a user: saves take the way of torch's plans."""


def _weights(**options: Any) -> tuple[Callable[[Path, int], object], Callable[[Path], int | None]]:
    def write(folder: Path, number: int) -> object:
        return save(_tensors(number), storage_writer=HuggingFaceStorageWriter(folder, **options))

    return write, _read_weights


def _read_weights(folder: Path) -> int | None:
    """Load the weights, in Dure and by the files that transformers looks for, in its order."""
    number = _read(folder, storage_reader=HuggingFaceStorageReader(folder))
    index, state = folder / "model.safetensors.index.json", {}
    if (folder / "model.safetensors").exists():
        state = load_file(folder / "model.safetensors")
    elif index.exists():
        placed = json.loads(index.read_text())["weight_map"]
        state = {name: load_file(folder / file)[name] for name, file in placed.items()}
    assert (_number_of(state) if state else None) == number
    return number


def _run(sharded: bool) -> tuple[Callable[[Path, int], object], Callable[[Path], int | None]]:
    """Return how a `Checkpointer` saves and loads a run, of which it keeps one checkpoint."""

    def model(number: float) -> nn.Module:
        made = nn.Linear(4, 3)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.fill_(number)
        return made

    def write(folder: Path, number: int) -> object:
        checkpoints = Checkpointer(folder, keep=1, sharded=sharded)
        return checkpoints.save(number, model=model(number), values=[number])

    def read(folder: Path) -> int | None:
        values, made = [0], model(0)
        number = Checkpointer(folder).load(model=made, values=values)
        if number is not None:
            assert values == [number], f"{values} in the checkpoint of step {number}"
            assert all(p.eq(number).all() for p in made.parameters()), f"not of step {number}"
        return number

    return write, read


WRITERS: dict[str, tuple[Callable[[Path, int], object], Callable[[Path], int | None]]] = {
    "save": (
        lambda folder, number: save(_tensors(number), checkpoint_id=folder),
        lambda folder: _read(folder, checkpoint_id=folder),
    ),
    "planner": (
        lambda folder, number: save(_tensors(number), checkpoint_id=folder, planner=_Planner()),
        lambda folder: _read(folder, checkpoint_id=folder),
    ),
    "async_save": (
        lambda folder, number: async_save(_tensors(number), checkpoint_id=folder).result(),
        lambda folder: _read(folder, checkpoint_id=folder),
    ),
    "weights in one file": _weights(),
    "weights in three files": _weights(max_bytes=100),
    "Checkpointer": _run(False),
    "Checkpointer, sharded": _run(True),
}


@dataclass(frozen=True, slots=True)
class Scenario:
    """A writer, ranks, and what is in the folder before: "fresh", "used" or "left"."""

    writer: str
    size: int
    folder: str


SCENARIOS = [
    Scenario(writer, size, folder)
    for writer in WRITERS
    for size in (1, 2)
    for folder in ("fresh", "used", "left")
]


# ---- faults --------------------------------------------------------------------------------------

_LIB = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class Fault:
    """A rank's call with this number fails, from 1 on; 0: none.

    Attributes:
        kind: KILL, or the name of an error. ENOENT is reported by a call that had its effect.
        from_there_on: Whether all later calls of its class fail, too.
    """

    rank: int = 0
    call: int = 0
    kind: str = "KILL"
    from_there_on: bool = False
    text: str = ""
    """The call, for messages."""


KINDS = "KILL EIO ENOSPC EMFILE ENOENT"
_CLASSES = {"KILL": "c", "EIO": "oc", "ENOSPC": "g", "EMFILE": "o", "ENOENT": "r"}


def _faults_at(rank: int, calls: list[str]) -> list[Fault]:
    """Return all faults of a rank that makes these calls: "classes name path"."""
    found: list[Fault] = []
    for number, text in enumerate(calls, 1):
        classes = text.split()[0]
        for kind, of in _CLASSES.items():
            if set(of) & set(classes):
                for again in [False] if kind == "KILL" else [False, True]:
                    found.append(Fault(rank, number, kind, again, text))
    return found


def _is_of_contents(call: str) -> bool:
    """Tell whether a save for which this call fails is not on the disk."""
    _, name, path = call.split(" ", 2)
    return name in ("write", "pwrite", "ftruncate", "fsync") and not path.endswith(".lock")


@dataclass(frozen=True, slots=True)
class _Outcome:
    """How a rank has ended: "saved", "raised", or "ended" by itself."""

    how: str
    text: str = ""
    calls: tuple[str, ...] = ()
    failed: bool = False


def _be_rank(
    scenario: Scenario, folder: Path, number: int, rank: int, fault: Fault, pipe: Connection
) -> None:
    """Save as one rank, and send how it went."""
    if scenario.size > 1:
        dure.init_process_group(
            "shm", f"file://{_meeting(folder)}", rank=rank, world_size=scenario.size
        )
        _tensors(number)  # makes the mesh
    armed = rank == fault.rank and fault.call > 0
    wrong = 0 if fault.kind == "KILL" else getattr(errno, fault.kind)
    of_class = _CLASSES[fault.kind][0].encode()
    prefix = os.fsencode(folder.parent)
    _LIB.faults_start(
        prefix, fault.call if armed else 0, wrong, fault.from_there_on, ctypes.c_char(of_class)
    )
    how, text = "saved", ""
    try:
        WRITERS[scenario.writer][0](folder, number)
    except DureError as e:
        how, text = "raised", f"{type(e).__name__}: {e}"
    except BaseException:
        how, text = "ended", traceback.format_exc()
    failed = bool(_LIB.faults_stop())
    calls = tuple(_LIB.faults_calls().decode(errors="replace").splitlines())
    pipe.send(_Outcome(how, text, calls, failed))


def _meeting(folder: Path) -> Path:
    """Return the file in which ranks meet; its calls do not count."""
    return folder.parent.with_name(f"meeting-{folder.parent.name}")


def _fork(work: Callable[[Connection], None]) -> tuple[int, Connection]:
    """Run `work` in a child, which ends when the returned connection is closed."""
    here, there = Pipe()
    child = os.fork()
    if child:
        there.close()
        return child, here
    here.close()
    try:
        work(there)
        there.poll(None)  # the other ranks may still need this one
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _received(children: list[tuple[int, Connection]]) -> list[Any]:
    """Return what children send; a text on how it ended of one that sends nothing."""
    replies: dict[Connection, Any] = {}
    deadline = time.monotonic() + PATIENCE_S
    while len(replies) < len(children) and time.monotonic() < deadline:
        left = [pipe for _, pipe in children if pipe not in replies]
        for pipe in wait(left, deadline - time.monotonic()):
            assert isinstance(pipe, Connection)
            try:
                replies[pipe] = pipe.recv()
            except EOFError:
                replies[pipe] = None
    found: list[Any] = []
    for child, pipe in children:
        if pipe not in replies:
            os.kill(child, signal.SIGKILL)
        pipe.close()
    for child, pipe in children:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        hangs = "does not end" if pipe not in replies else f"ended with {status}"
        found.append(hangs if replies.get(pipe) is None else replies[pipe])
    return found


def _saved(scenario: Scenario, folder: Path, number: int, fault: Fault) -> list[Any]:
    """Save in as many ranks; return each one's `_Outcome`, or how its process ended."""
    try:
        return _received(
            [
                _fork(partial(_be_rank, scenario, folder, number, rank, fault))
                for rank in range(scenario.size)
            ]
        )
    finally:
        _meeting(folder).unlink(missing_ok=True)


def _in_child(work: Callable[..., Any], *args: Any) -> Any:
    """Return what `work` returns in a child, or its error as a text."""

    def body(pipe: Connection) -> None:
        try:
            pipe.send((work(*args), ""))
        except BaseException:
            pipe.send((None, traceback.format_exc()))

    (reply,) = _received([_fork(body)])
    return reply if isinstance(reply, tuple) else (None, reply)


# ---- one scenario --------------------------------------------------------------------------------


def _files(folder: Path) -> list[str]:
    """Return the kinds of files in a folder, sorted: how many, not how they are numbered."""
    paths = [str(p.relative_to(folder)) for p in folder.rglob("*") if p.name != ".lock"]
    return sorted(re.sub(r"[-\d]+", "-", path) for path in paths)


def _next_save(scenario: Scenario, folder: Path, before: set[int | None]) -> list[str]:
    """Load, save number 3 and load it; return the files then.

    Raises:
        AssertionError: Something else was loaded.
    """
    write, read = WRITERS[scenario.writer]
    found = read(folder)
    assert found in before, f"number {found} is loaded, not one of {before}"
    write(folder, NEXT)
    found = read(folder)
    assert found == NEXT, f"number {found} is loaded after the next save"
    return _files(folder)


class _Runs:
    """The runs of one scenario, in a folder for itself."""

    def __init__(self, scenario: Scenario, top: Path) -> None:
        self._scenario, self._top, self._count = scenario, top, 0
        self._alone = Scenario(scenario.writer, 1, scenario.folder)
        self.template = top / "template"
        self._prepare()

    def _prepare(self) -> None:
        folder = self.template / "saved"
        (folder / "logs").mkdir(parents=True)
        for name, data in BESIDE.items():
            (folder / name).write_bytes(data)
        self.before: int | None = None
        if self._scenario.folder != "fresh":
            outcomes = _saved(self._scenario, folder, OLD, Fault())
            assert all(o.how == "saved" for o in outcomes), outcomes
            self.before = OLD
        if self._scenario.folder == "left":
            copy = self._copy()
            calls = self._unharmed(copy)[0]
            self._remove(copy)
            changes = [n for n, text in enumerate(calls, 1) if "c" in text.split()[0]]
            # Most is written by then; what comes later publishes it, and cleans up.
            _saved(self._scenario, folder, NEW, Fault(0, changes[2 * len(changes) // 3]))
            self.before, problem = _in_child(WRITERS[self._scenario.writer][1], folder)
            assert not problem, problem
        copy = self._copy()
        self.calls = self._unharmed(copy)
        self.files, problem = _in_child(_next_save, self._alone, copy, {NEW})
        assert not problem, problem
        self._remove(copy)

    def _copy(self) -> Path:
        self._count += 1
        made = self._top / f"case{self._count}"
        shutil.copytree(self.template, made)
        return made / "saved"

    def _remove(self, copy: Path) -> None:
        shutil.rmtree(copy.parent)

    def _unharmed(self, copy: Path) -> list[list[str]]:
        """Save without a fault; return the calls of each rank."""
        outcomes = _saved(self._scenario, copy, NEW, Fault())
        assert all(isinstance(o, _Outcome) and o.how == "saved" for o in outcomes), outcomes
        return [list(o.calls) for o in outcomes]

    def problem(self, fault: Fault) -> tuple[str, bool]:
        """Run a case; return what was wrong, "": nothing, and whether the fault has occurred."""
        copy = self._copy()
        outcomes = _saved(self._scenario, copy, NEW, fault)
        mine = outcomes[fault.rank]
        hit = mine == "ended with -9" if fault.kind == "KILL" else getattr(mine, "failed", False)
        killed = fault.kind == "KILL" and hit
        lines: list[str] = []
        for rank, outcome in enumerate(outcomes):
            if isinstance(outcome, str) and not (killed and rank == fault.rank):
                lines.append(f"rank {rank} {outcome}")
            if isinstance(outcome, _Outcome) and outcome.how == "ended":
                lines.append(f"rank {rank} has raised no error of Dure: {outcome.text}")
        if hit and isinstance(mine, _Outcome) and mine.how == "saved":
            call = mine.calls[fault.call - 1]
            if _is_of_contents(call):
                lines.append(f"saved, although a call has failed: {call}")
        ways = {o.how for o in outcomes if isinstance(o, _Outcome)}
        if len(ways) > 1 and not killed:
            lines.append(f"ranks have ended in different ways: {ways}")
        allowed: set[int | None] = {NEW} if "saved" in ways else {NEW, self.before}
        files, problem = _in_child(_next_save, self._alone, copy, allowed)
        if problem:
            lines.append(problem)
        elif files != self.files:
            lines.append(f"files after the next save: {files}, not {self.files}")
        if any((copy / name).read_bytes() != data for name, data in BESIDE.items()):
            lines.append("other files in the folder have changed")
        if lines:
            told = [o if isinstance(o, str) else f"{o.how} {o.text:.300}" for o in outcomes]
            lines += [f"(ranks: {told})"]
        self._remove(copy)
        return "\n".join(lines), hit


@dataclass(frozen=True, slots=True)
class Report:
    """What came of a scenario's cases."""

    num_cases: int
    num_hits: int
    problems: list[str]
    """Of each case that was not right."""


def run(scenario: Scenario, num_cases: int | None, kinds: str, seed: int) -> Report:
    """Run cases of a scenario, of some kinds of faults: all, or as many that are drawn.

    One of those that are drawn kills rank 0.
    """
    with tempfile.TemporaryDirectory(prefix="dure-failing-saves-") as top:
        runs = _Runs(scenario, Path(top))
        faults = [f for rank, calls in enumerate(runs.calls) for f in _faults_at(rank, calls)]
        faults = [fault for fault in faults if fault.kind in kinds.split()]
        if num_cases is not None:
            drawn, of_rank_0 = random.Random(seed), [f for f in faults if f.rank == 0]
            killed = drawn.choice([f for f in of_rank_0 if f.kind == "KILL"])
            others = [fault for fault in faults if fault != killed]
            faults = [killed, *drawn.sample(others, min(num_cases - 1, len(others)))]
        problems: list[str] = []
        hits = 0
        for fault in faults:
            problem, hit = runs.problem(fault)
            hits += hit
            if problem:
                problems.append(f"{scenario}\n{fault}\n{problem}")
        return Report(len(faults), hits, problems)


def main() -> None:
    """Serve calls of `run` over the connection sys.argv[1], until it is closed."""
    torch.set_num_threads(1)
    for name in ("numpy.random", "dure.comm.backends.shm.backend"):
        importlib.import_module(name)  # every child would import it
    gc.freeze()  # what is collected in a child would be copied there
    _LIB.faults_calls.restype = ctypes.c_char_p
    pipe = Connection(int(sys.argv[1]))
    while True:
        try:
            pipe.send(run(*pipe.recv()))
        except EOFError:
            return
