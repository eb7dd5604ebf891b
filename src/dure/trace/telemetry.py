"""Spans of OpenTelemetry: the launch, phases of training steps, and slow operations.

Off unless DURE_OTEL_MS is set, to the least time in milliseconds that an operation must take. Dure
uses the package `opentelemetry-api` only: the program chooses an SDK and where spans are sent. A
process without an SDK makes spans that are sent nowhere.

The launcher's span is the parent of all others: its ranks find it in TRACEPARENT, the variable of
W3C's trace context. A rank makes its spans afterwards, once a second, of what the flight recorder
and the modules have recorded, in a thread of its own; they have the times of what they describe.
So an operation itself costs nothing more.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any  # what opentelemetry-api has, which need not be installed

from dure import env
from dure.trace import flight, logs
from dure.trace.record import Record, State
from dure.trace.spans import STEP, Span, SpanRecorder

__all__ = ["Exporter", "launch_span", "start", "stop"]

_log = logs.logger("trace")
_EVERY_S = 1.0
_SETTLED_NS = 5_000_000
"""An operation is complete in the recorder so long after its end."""


class Exporter:
    """Makes spans of what this process has recorded.

    Args:
        threshold_ms: The least duration of an operation.
        parent: A W3C trace context; empty: none.
    """

    def __init__(self, threshold_ms: float, parent: str = "") -> None:
        self._api: Any = import_module("opentelemetry.trace")
        self._tracer = self._api.get_tracer("dure")
        self._context = _context_of(parent)
        self._threshold_ns = int(threshold_ms * 1e6)
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        self._until_ns = time.monotonic_ns()

    def export(self, records: Iterable[Record], phases: Iterable[Span], now_ns: int) -> None:
        """Make spans of operations and phases that have ended since the last call.

        Args:
            records: The last operations; those that were exported, too.
            phases: The last spans of modules; the same.
            now_ns: The time, on `time.monotonic_ns`.
        """
        since_ns, self._until_ns = self._until_ns, now_ns - _SETTLED_NS
        for record in records:
            is_new = since_ns < record.end_ns <= self._until_ns
            if is_new and record.duration_ns >= self._threshold_ns:
                self._operation(record)
        for phase in phases:
            if phase.track == STEP and since_ns < phase.end_ns <= self._until_ns:
                facts = {"dure.rank": phase.global_rank}
                self._make(f"dure.step.{phase.name}", phase.start_ns, phase.end_ns, facts)

    def _operation(self, record: Record) -> None:
        facts = {
            "dure.rank": record.global_rank,
            "dure.group": record.group,
            "dure.number": record.seq,
            "dure.bytes": record.nbytes,
            "dure.call_site": record.site,
        }
        error = record.error if record.state is State.FAILED else ""
        self._make(f"dure.{record.op}", record.start_ns, record.end_ns, facts, error)

    def _make(
        self, name: str, start_ns: int, end_ns: int, facts: Mapping[str, object], error: str = ""
    ) -> None:
        begin = self._epoch_ns + start_ns
        made = self._tracer.start_span(
            name, context=self._context, attributes=facts, start_time=begin
        )
        if error:
            made.set_status(self._api.Status(self._api.StatusCode.ERROR, error))
        made.end(end_time=self._epoch_ns + end_ns)


def _context_of(parent: str) -> Any:
    """Return the context of a W3C trace context; None if there is none."""
    if not parent:
        return None
    form: Any = import_module("opentelemetry.trace.propagation.tracecontext")
    return form.TraceContextTextMapPropagator().extract({"traceparent": parent})


class _Thread:
    """Exports what this process records until it ends."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter, self._ended = exporter, threading.Event()
        self._spans = SpanRecorder(2000)
        self._spans.start()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="dure-telemetry", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_S):
            self.export(time.monotonic_ns())

    def export(self, now_ns: int) -> None:
        """Export what has ended; a failing exporter of the program must not end the thread."""
        with self._lock, suppress(Exception):
            records = flight.recorded()
            ranks = {record.global_rank for record in records}
            phases = [span for rank in ranks for span in self._spans.of(rank)]
            self._exporter.export(records, phases, now_ns)

    def stop(self) -> None:
        """Stop, after a last export."""
        self._ended.set()
        self._thread.join()
        self._spans.stop()
        self.export(time.monotonic_ns() + _SETTLED_NS)


_threads: list[_Thread] = []
os.register_at_fork(after_in_child=_threads.clear)


def start() -> None:
    """Start to make spans, if DURE_OTEL_MS is set; once."""
    threshold_ms = env.integer("DURE_OTEL_MS")
    if threshold_ms is None or _threads:
        return
    try:
        exporter = Exporter(threshold_ms, env.text("TRACEPARENT") or "")
    except ImportError:
        _log.warning("DURE_OTEL_MS has no effect: pip install opentelemetry-api, and an SDK")
        return
    _threads.append(_Thread(exporter))
    atexit.register(_stop_at_exit, os.getpid())  # before the SDK ends, which was made before


def stop() -> None:
    """Make the last spans, and no more until `start` is called again."""
    while _threads:
        _threads.pop().stop()


def _stop_at_exit(pid: int) -> None:
    if os.getpid() == pid:
        stop()


@contextmanager
def launch_span(program: str, num_ranks: int) -> Generator[dict[str, str]]:
    """Make the span of a launch, if DURE_OTEL_MS is set.

    Args:
        program: The program that is launched.
        num_ranks: On this host.

    Yields:
        Variables for the ranks, in which they find this span.
    """
    if env.integer("DURE_OTEL_MS") is None:
        yield {}
        return
    try:
        api: Any = import_module("opentelemetry.trace")
    except ImportError:  # ranks warn of it
        yield {}
        return
    facts = {"dure.program": program, "dure.ranks": num_ranks}
    context = _context_of(env.text("TRACEPARENT") or "")
    with api.get_tracer("dure").start_as_current_span("dure.launch", context, attributes=facts):
        form: Any = import_module("opentelemetry.trace.propagation.tracecontext")
        found: dict[str, str] = {}
        form.TraceContextTextMapPropagator().inject(found)
        yield {"TRACEPARENT": found["traceparent"]} if "traceparent" in found else {}
