"""Lines at DEBUG that report how calls run: one for the first call of each class.

A class is an operation on a group, with its dtype, reduction and size (within a factor of four).
The engine's fast path reports nothing, so `watch` adds a hook, with which every call takes the slow
path (see group/operations.py). The hook is added when a group is made while the logger "dure.comm"
is at DEBUG; without it calls are not slower. The level must be that of "dure.comm" or "dure": a
root logger at DEBUG does not make calls slower.
"""

from __future__ import annotations

import logging

from dure import trace
from dure.comm.backends.base import Backend
from dure.comm.call import Call
from dure.trace import logs

__all__ = ["note", "watch"]

_log = logs.logger("comm")
_hook = trace.Hook()
_seen: set[tuple[object, ...]] = set()


def _is_wanted() -> bool:
    own = (logging.getLogger(name).level for name in ("dure.comm", "dure"))
    return _log.isEnabledFor(logging.DEBUG) and any(0 < n <= logging.DEBUG for n in own)


def watch() -> None:
    """Begin to note calls if the logger is at DEBUG, and stop if it no longer is."""
    wanted = _is_wanted()
    if wanted and _hook not in trace.hooks:
        trace.hooks.append(_hook)
    elif not wanted:
        trace.remove_hook(_hook)
        _seen.clear()


@logs.never_fails
def note(group: str, size: int, backend: Backend, call: Call, async_op: bool) -> None:
    """Write a line if the call is the first of its class, or runs in another way than before."""
    if _hook not in trace.hooks:
        return
    if not _is_wanted():
        watch()
        return
    data, reduction = call.data, call.reduction
    nbytes = 0 if data is None else data.nbytes
    dtype = "" if data is None else str(data.dtype).removeprefix("torch.")
    chosen = getattr(backend, "way", None)
    way = "" if chosen is None else str(chosen(call))
    kind = "" if reduction is None else reduction.name
    key = (group, call.op, dtype, kind, (nbytes.bit_length() + 1) // 2, way, async_op)
    if key in _seen:
        return
    _seen.add(key)
    words = " ".join(word for word in (kind, dtype) if word)
    _log.debug(
        "group %r: %s%s of %d bytes%s on %d ranks: %s%s",
        *(group, "asynchronous " if async_op else "", call.op, nbytes),
        *(f" ({words})" if words else "", size, backend.name, f", {way}" if way else ""),
    )
