"""Remote calls in torch's profilers.

While a profiler runs, each call is a range `rpc_async#add(worker0 -> worker1)` of the thread that
makes it; in `torch.profiler` it is `rpc#add(worker0 -> worker1)`, as torch has none there.

With `torch.autograd.profiler_legacy` the callee profiles the function, too. Its events come back
with the result, and are put beside the caller's when its profiler ends, within the call's range:
named `<range>#remote_op: <event>`, with the callee's id as `node_id`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import profiler_legacy
from torch.autograd.profiler_util import FunctionEvent

from dure.rpc.functions import MARK
from dure.rpc.names import WorkerInfo

if TYPE_CHECKING:
    from dure.rpc.agent import RpcAgent

__all__ = ["call", "follow_profiler"]

_here = threading.local()
"""`session`: of the legacy profiler that runs in this thread."""


Event = tuple[str, float, float, int, Any, int, int]
"""Name, start, end (microseconds), thread, shapes, bytes, and the worker, -1 for the callee."""


class _Session:
    """The calls made while one legacy profiler runs."""

    def __init__(self, profile: Any) -> None:
        self.what = bool(profile.record_shapes), bool(profile.profile_memory)
        self.me = -1
        self.calls: list[tuple[str, int, list[Event]]] = []

    def events(self, local: list[FunctionEvent]) -> list[FunctionEvent]:
        """Return the events of the callees, each in the middle of the range of its call."""
        made: list[FunctionEvent] = []
        ranges: dict[str, list[Any]] = {}
        for event in local:
            ranges.setdefault(event.name, []).append(event.time_range)
            event.node_id = self.me if event.node_id < 0 else event.node_id
        for key, callee, events in self.calls:
            first = min((event[1] for event in events), default=0.0)
            span = max((event[2] for event in events), default=0.0) - first
            its = ranges[key].pop(0)
            begin = its.start + max(1.0, (its.end - its.start - span) / 2) - first
            for name, start, end, thread, shapes, nbytes, worker in events:
                shown = f"{key}#remote_op: {name}"
                made.append(
                    FunctionEvent(
                        id=0,
                        name=shown,
                        trace_name=shown,
                        node_id=callee if worker < 0 else worker,
                        thread=thread,
                        start_us=begin + start,
                        end_us=begin + end,
                        input_shapes=shapes,
                        cpu_memory_usage=nbytes,
                        is_remote=True,
                        is_legacy=True,
                    )
                )
        return made


def follow_profiler() -> None:
    """Patch the legacy profiler to show remote calls; once per process."""
    legacy: Any = profiler_legacy
    start, parse = legacy.profile._start_trace, legacy._parse_legacy_records
    if hasattr(start, "follows"):
        return

    def start_trace(profile: Any) -> None:
        _here.session = _Session(profile)
        start(profile)

    def parse_records(records: Any) -> list[FunctionEvent]:
        events: list[FunctionEvent] = parse(records)
        session, _here.session = getattr(_here, "session", None), None
        if session is not None:
            events += session.events(events)
            events.sort(key=lambda event: (event.time_range.start, -event.time_range.end))
        return events

    start_trace.follows = True  # pyright: ignore[reportFunctionMemberAccess]
    legacy.profile._start_trace, legacy._parse_legacy_records = start_trace, parse_records


def call(agent: RpcAgent, kind: str, to: str | int | WorkerInfo, func: Any, *rest: Any) -> Any:
    """Make a call of the kind "sync", "async" or "remote" while a profiler runs."""
    session: _Session | None = getattr(_here, "session", None)
    way: Callable[..., Any] = getattr(agent, "remote" if kind == "remote" else f"rpc_{kind}")
    name = getattr(func, "__qualname__", type(func).__qualname__)
    worker = agent.find(to)
    ends = f"{name}({agent.me.name} -> {worker.name})"
    if session is None:
        with torch.profiler.record_function(f"rpc#{ends}"):
            return way(to, func, *rest)
    key, session.me = f"rpc_{kind}#{ends}", agent.me.id
    events: list[Event] = []
    session.calls.append((key, worker.id, events))
    with torch.profiler.record_function(key):
        if kind == "remote" or hasattr(func, MARK):
            return way(to, func, *rest)
        args, kwargs, timeout = rest
        answer = way(to, profiled, (func, args, kwargs, session.what), None, timeout)
        if kind == "sync":
            value, events[:] = answer
            return value
    future: torch.futures.Future[Any] = torch.futures.Future()

    def answered(done: torch.futures.Future[Any]) -> None:
        try:
            value, events[:] = done.value()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(value)

    answer.add_done_callback(answered)
    return future


def profiled(
    func: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: dict[str, Any] | None,
    what: tuple[bool, bool],
) -> tuple[Any, list[Event]]:
    """Run a call for a caller that profiles it."""
    profile: Any = profiler_legacy.profile(record_shapes=what[0], profile_memory=what[1])
    with profile:
        value = func(*(args or ()), **(kwargs or {}))
    return value, [
        (
            event.name,
            event.time_range.start,
            event.time_range.end,
            event.thread,
            event.input_shapes,
            event.cpu_memory_usage,
            event.node_id if event.is_remote else -1,
        )
        for event in profile.function_events
    ]
