"""Metrics of a job in the text format of Prometheus (`dure run --metrics-port`).

Each launcher answers for the ranks of its host: those that it starts, and what they report. Ranks
write counts of their operations into a folder once a second (`dure.trace.counting`); the rest the
launcher knows: steps (`dure.progress`), restarts, the processes.

How long ranks wait for each other is known for collectives whose ranks are all on this host: a rank
waits from its own call to the last one's. Ranks report the beginnings of some collectives
(`counting`), and these are compared here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import psutil

from dure.errors import LaunchError
from dure.launch.http_port import Answer, HttpPort
from dure.launch.ranks.errorfiles import temporary_folder
from dure.launch.ranks.report import ReportedStep
from dure.launch.show.watcher import Watchers
from dure.launch.spec import JobSpec, Stream

__all__ = ["JobMetrics", "Waits", "served_metrics"]

KIND = "text/plain; version=0.0.4; charset=utf-8"
_EVERY_S = 1.0
_MOST_KEPT = 8192
"""Collectives of which not all ranks have reported the beginning, or all have."""
_HELP = {
    "dure_rank_restarts_total": ("counter", "How often the rank was started again."),
    "dure_rank_up": ("gauge", "1 while the rank's process runs."),
    "dure_rank_step": ("gauge", "Last step that the rank reported with dure.progress."),
    "dure_rank_memory_bytes": ("gauge", "Resident memory of the rank's process."),
    "dure_operations_total": ("counter", "Operations that have ended."),
    "dure_operation_bytes_total": ("counter", "Bytes of this rank's inputs of operations."),
    "dure_operation_seconds_total": ("counter", "Time from calls to ends of operations."),
    "dure_operation_failures_total": ("counter", "Operations that ended with an error."),
    "dure_operations_unseen_total": ("counter", "Collectives that were not counted: too many."),
    "dure_rank_waits_total": ("counter", "Collectives that were compared between ranks."),
    "dure_rank_wait_seconds_total": ("counter", "Time in these until the last rank's call."),
}


class Waits:
    """How long each rank has waited for the last one in collectives, since the job began."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.seconds: dict[int, float] = {}
        self._starts: OrderedDict[tuple[str, int], dict[int, int]] = OrderedDict()
        """Of each collective the ranks' beginnings; empty when it was added."""

    def note(self, rank: int, group: str, size: int, starts: list[tuple[int, int]]) -> None:
        """Note when a rank began some collectives of a group of that size."""
        for number, start_ns in starts:
            key = group, number
            known = key in self._starts
            found = self._starts.setdefault(key, {})
            if known and not found:  # added already
                continue
            found[rank] = start_ns
            if len(found) == size:
                self._add(found)
                found.clear()
        while len(self._starts) > _MOST_KEPT:
            self._starts.popitem(last=False)

    def forget(self) -> None:
        """Forget collectives of a round that has ended: groups of the next have the same names."""
        self._starts.clear()

    def _add(self, starts: dict[int, int]) -> None:
        last = max(starts.values())
        for rank, start_ns in starts.items():
            self.counts[rank] = self.counts.get(rank, 0) + 1
            self.seconds[rank] = self.seconds.get(rank, 0.0) + (last - start_ns) / 1e9


@dataclasses.dataclass
class _Rank:
    pid: int
    up: bool = True
    step: int | None = None
    restarts: int = 0


class JobMetrics:
    """What is known of the ranks of this host (a `Watcher`).

    Args:
        folder: Into which ranks publish.

    Threads:
        `text` and `compare` on any thread.
    """

    due_at = math.inf

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._ranks: dict[int, _Rank] = {}
        self._waits = Waits()

    def noted(self, event: Mapping[str, object]) -> None:
        """Record an event of the job (docs/launch.md, "Events")."""
        name, rank = event["event"], cast(int, event.get("rank", -1))
        with self._lock:
            if name == "started":
                before = self._ranks.get(rank)
                restarts = 0 if before is None else before.restarts + 1
                if before is not None:
                    self._waits.forget()
                self._ranks[rank] = _Rank(cast(int, event["pid"]), restarts=restarts)
            elif name == "ended" and rank in self._ranks:
                self._ranks[rank].up = False

    def wrote(self, rank: int, stream: Stream, lines: list[bytes]) -> None:
        """Ignore what ranks write."""

    def spoke(self, rank: int, line: bytes) -> None:
        """Ignore what ranks write."""

    def progressed(self, rank: int, step: ReportedStep) -> None:
        """Record a rank's step."""
        with self._lock:
            if rank in self._ranks:
                self._ranks[rank].step = step.step

    def tick(self, now: float) -> None:
        """Do nothing: requests are answered on threads."""

    def compare(self) -> None:
        """Compare the beginnings of collectives that ranks have reported."""
        counts = self._counts()
        with self._lock:
            for rank, found in counts.items():
                for group, (size, starts) in found["starts"].items():
                    self._waits.note(rank, group, size, [(n, at) for n, at in starts])

    def _counts(self) -> dict[int, dict[str, Any]]:
        """Return what each rank that runs, or has ended, has published."""
        with self._lock:
            pids = {rank: it.pid for rank, it in self._ranks.items()}
        found: dict[int, dict[str, Any]] = {}
        for rank, pid in pids.items():
            with contextlib.suppress(OSError, ValueError):
                content = json.loads((self._folder / f"rank{rank}.json").read_text())
                if content["pid"] == pid:  # not of the process before
                    found[rank] = content
        return found

    def text(self) -> str:
        """Return all metrics."""
        counts = self._counts()
        out = _Text()
        with self._lock:
            ranks, waits = sorted(self._ranks.items()), self._waits
            for rank, it in ranks:
                out.add("dure_rank_restarts_total", it.restarts, rank=rank)
                out.add("dure_rank_up", int(it.up), rank=rank)
                if it.step is not None:
                    out.add("dure_rank_step", it.step, rank=rank)
            for rank, count in sorted(waits.counts.items()):
                out.add("dure_rank_waits_total", count, rank=rank)
                out.add("dure_rank_wait_seconds_total", waits.seconds[rank], rank=rank)
        for rank, it in ranks:
            with contextlib.suppress(psutil.Error):
                if it.up:
                    memory = psutil.Process(it.pid).memory_info().rss
                    out.add("dure_rank_memory_bytes", memory, rank=rank)
        for rank, found in sorted(counts.items()):
            out.add("dure_operations_unseen_total", found["unseen"], rank=rank)
            for op, (count, num_bytes, seconds, failures) in sorted(found["operations"].items()):
                out.add("dure_operations_total", count, rank=rank, op=op)
                out.add("dure_operation_bytes_total", num_bytes, rank=rank, op=op)
                out.add("dure_operation_seconds_total", seconds, rank=rank, op=op)
                out.add("dure_operation_failures_total", failures, rank=rank, op=op)
        return out.text()


class _Text:
    """Metrics in the text format: all samples of one below each other."""

    def __init__(self) -> None:
        self._samples: dict[str, list[str]] = {}

    def add(self, name: str, value: float, **labels: object) -> None:
        shown = ",".join(f'{label}="{_escaped(str(of))}"' for label, of in labels.items())
        sample = f"{name}{{{shown}}} {value}" if shown else f"{name} {value}"
        self._samples.setdefault(name, []).append(sample)

    def text(self) -> str:
        lines: list[str] = []
        for name, samples in self._samples.items():
            kind, what = _HELP[name]
            lines += [f"# HELP {name} {what}", f"# TYPE {name} {kind}", *samples]
        return "".join(f"{line}\n" for line in lines)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


@contextlib.contextmanager
def served_metrics(spec: JobSpec, port: int) -> Iterator[JobSpec]:
    """Answer requests for metrics while the block runs the job.

    Args:
        spec: The job.
        port: The TCP port, on every address of this host.

    Yields:
        The job as it is to be run for that.

    Raises:
        LaunchError: The port cannot be used.
    """
    with temporary_folder(f"metrics_{uuid.uuid4().hex}") as folder:
        metrics, ended = JobMetrics(folder), threading.Event()

        def answer(path: str) -> Answer:
            if path.partition("?")[0] not in ("/metrics", "/"):
                return Answer(404, "text/plain; charset=utf-8", "the metrics are at /metrics\n")
            return Answer(200, KIND, metrics.text())

        def compare() -> None:
            while not ended.wait(_EVERY_S):
                metrics.compare()

        try:
            http = HttpPort(port, "dure-metrics", answer)
        except (OSError, OverflowError) as error:
            raise LaunchError(
                f"port {port} cannot be used for metrics",
                seen=str(error),
                fix="Name another one with --metrics-port.",
            ) from error
        with contextlib.closing(http):
            thread = threading.Thread(target=compare, name="dure-waits", daemon=True)
            thread.start()
            try:
                yield _watched(spec, metrics, folder)
            finally:
                ended.set()
                thread.join()


def _watched(spec: JobSpec, metrics: JobMetrics, folder: Path) -> JobSpec:
    others = spec.on_event

    def noted(event: Mapping[str, object]) -> None:
        metrics.noted(event)
        if others is not None:
            others(event)

    return dataclasses.replace(
        spec,
        env={**spec.env, "DURE_METRICS_DIR": os.fspath(folder)},
        watcher=metrics if spec.watcher is None else Watchers(spec.watcher, metrics),
        on_event=noted,
    )
