"""Point-to-point in a hybrid group: shared memory inside the host, the mesh between hosts.

An engine cannot say what has arrived, nor take back a receive; yet a receive from anyone may be
answered from either side. So each message between hosts is announced by an *envelope* (number, tag,
bytes, dtype) under a tag of its own, and the *receive thread* takes envelopes from anyone and
matches them with posted receives. As soon as a receive has an envelope that fits, the engine is
asked for the message, whose tag at the engine is its number. Messages of one pair and tag are
matched in the order of their envelopes, which the engine keeps. A receive from anyone also looks,
between naps, whether shared memory has a message for it.

The receive thread begins with the first receive that concerns other hosts.

Cost: one more message of 32 bytes for every message between hosts; none inside a host.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from dure.comm.backends.hybrid.subcomms import SubComms
from dure.comm.backends.request import Request, finished
from dure.comm.codes import dtype_code
from dure.errors import CommTimeout, Desync, DureError

__all__ = ["Envelope", "MatchingQueue", "Messages", "PostedReceive"]

_ENVELOPE = struct.Struct("<QQQQ")
_NAP_S = 0.0005
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Envelope:
    """An announced message."""

    source: int
    number: int
    tag: int
    nbytes: int
    dtype: int


@dataclass(slots=True, eq=False)
class PostedReceive:
    """A posted receive; `envelope` is what answers it, `answered` is called then."""

    source: int | None
    tag: int
    answered: Callable[[], object]
    envelope: Envelope | None = None
    found: threading.Event = field(default_factory=threading.Event)

    def fits(self, envelope: Envelope) -> bool:
        """Tell whether `envelope` may answer."""
        return self.tag == envelope.tag and self.source in (None, envelope.source)


class MatchingQueue:
    """Envelopes that nobody has asked for, and receives that nobody has answered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._envelopes: list[Envelope] = []
        self._posted: list[PostedReceive] = []

    def deliver(self, envelope: Envelope) -> None:
        """Give a envelope to the first receive that it fits."""
        with self._lock:
            posted = next((w for w in self._posted if w.fits(envelope)), None)
            if posted is None:
                self._envelopes.append(envelope)
                return
            self._posted.remove(posted)
            posted.envelope = envelope
        posted.answered()
        posted.found.set()

    def post(self, posted: PostedReceive) -> None:
        """Ask for a envelope."""
        with self._lock:
            envelope = next((x for x in self._envelopes if posted.fits(x)), None)
            if envelope is None:
                self._posted.append(posted)
                return
            self._envelopes.remove(envelope)
            posted.envelope = envelope
        posted.answered()
        posted.found.set()

    def withdraw(self, posted: PostedReceive) -> bool:
        """Take a receive back; False if it has been answered."""
        with self._lock:
            if posted.envelope is not None:
                return False
            if posted in self._posted:
                self._posted.remove(posted)
            return True

    def put_back(self, envelope: Envelope) -> None:
        """Return a envelope that its receive could not use, before all others."""
        with self._lock:
            self._envelopes.insert(0, envelope)


class _Part(Request):
    """A pending message: what carries it, and the group's rank at the other end."""

    __slots__ = ("_comms", "_op", "_parts", "_peer")

    def __init__(
        self, comms: SubComms, op: str, peer: int, parts: list[Request | None], keep: object = None
    ) -> None:
        super().__init__(keep)
        self._comms, self._op, self._peer = comms, op, peer
        self._parts = [p for p in parts if p is not None]

    def _poll(self) -> None:
        if all(p.done() for p in self._parts):
            self._await(time.monotonic())

    def _await(self, limit: float | None) -> bool:
        try:
            for part in self._parts:
                if not _await(self._comms, part, self._op, limit):
                    return False
        except DureError as e:
            self.end(e)
        self.end(None, self._peer if self._op == "recv" else -1)
        return True


class _ReceiveRequest(Request):
    """A pending receive that another host may answer."""

    __slots__ = ("_began", "_inner", "_messages", "_starting", "_tensor", "posted")

    def __init__(
        self, messages: Messages, tensor: torch.Tensor, source: int | None, tag: int
    ) -> None:
        super().__init__()
        self._messages, self._tensor = messages, tensor
        self.posted = PostedReceive(source, tag, self._begin)
        self._starting = threading.Lock()
        self._inner: Request | None = None
        self._began = time.monotonic()

    def _poll(self) -> None:
        self._begin()
        if self._inner is not None and self._inner.done():
            self._await(time.monotonic())

    def _await(self, limit: float | None) -> bool:
        try:
            if not self.await_answer(limit):
                return False
            inner = self._inner
            if inner is not None and not _await(self._messages.comms, inner, "recv", limit):
                return False
        except DureError as e:
            self.end(e)
        self.end(None)
        return True

    def await_answer(self, until: float | None) -> bool:
        """Wait until it is known where the message comes from; False when it is `until`."""
        looked = time.monotonic()
        while True:
            self._begin()
            if self._inner is not None or self.ended:
                return True
            now = time.monotonic()
            if until is not None and now >= until:
                return False
            if now - looked > _LOOK_S:
                looked = now
                self._messages.examine(self)
            nap = _NAP_S if self.posted.source is None else _LOOK_S
            self.posted.found.wait(nap if until is None else min(nap, max(0.0, until - now)))

    def _begin(self) -> None:
        """Begin to receive, if it is known from where."""
        with self._starting:
            if self._inner is not None or self.ended:
                return
            try:
                self._inner, self.source = self._messages.answer(self.posted, self._tensor)
            except DureError as e:
                self.end(e)

    def give_up(self, error: DureError) -> None:
        """End with `error`, unless an answer has come."""
        with self._starting:
            if self._inner is None and self._messages.queue.withdraw(self.posted):
                self.end(error)

    @property
    def waited_s(self) -> float:
        """Seconds since it was posted."""
        return time.monotonic() - self._began


class Messages:
    """The messages of one rank. Threads: every method, from any thread.

    Args:
        comms: The group's parts.
    """

    def __init__(self, comms: SubComms) -> None:
        self.comms, self.queue = comms, MatchingQueue()
        self._lock = threading.Lock()
        _, self._envelope_tag, self._num_numbers = comms.mesh_tags
        self._sent: defaultdict[int, int] = defaultdict(int)
        self._receive_thread: threading.Thread | None = None

    def send(self, tensor: torch.Tensor, dst: int, tag: int, async_op: bool) -> Request | None:
        """See `Backend.send`."""
        comms = self.comms
        comms.state.check("send")
        host, place = comms.hosts.place_of(dst)
        if host == comms.here:
            call = lambda: comms.local.send(tensor, place, tag, async_op)  # noqa: E731
            return self._guarded("send", call)
        with self._lock:
            number = self._sent[dst] = (self._sent[dst] + 1) % self._num_numbers
            head = _ENVELOPE.pack(number, tag, tensor.nbytes, dtype_code(tensor.dtype))
            envelope = torch.frombuffer(bytearray(head), dtype=torch.uint8)
            parts = [comms.mesh.send(envelope, dst, self._envelope_tag, True)]
            if tensor.numel():
                parts.append(comms.mesh.send(tensor, dst, number, True))
        request = _Part(comms, "send", dst, parts, (envelope, tensor))
        if async_op:
            return request
        request.wait()
        return None

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> Request:
        """See `Backend.recv`."""
        comms = self.comms
        comms.state.check("recv")
        if src is not None:
            host, place = comms.hosts.place_of(src)
            if host == comms.here:
                call = lambda: comms.local.recv(tensor, place, tag, async_op)  # noqa: E731
                inside = _Part(comms, "recv", src, [self._guarded("recv", call)])
                if not async_op:
                    inside.wait()
                return inside
        self._start_receive_thread()
        request = _ReceiveRequest(self, tensor, src, tag)
        self.queue.post(request.posted)
        if not async_op:
            request.wait()
        elif src is None:  # somebody must look into shared memory
            threading.Thread(target=_attend, args=(request,), name="dure-recv", daemon=True).start()
        return request

    def answer(self, posted: PostedReceive, tensor: torch.Tensor) -> tuple[Request | None, int]:
        """Begin to receive what `posted` asks for, if it is there.

        Returns:
            The request, and the sender; None, and -1, while it is not there.
        """
        comms = self.comms
        if posted.envelope is None and posted.source is None:
            place = comms.local.sender_of(posted.tag)
            if place >= 0 and self.queue.withdraw(posted):
                request = comms.local.recv(tensor, place, posted.tag, True)
                return request, comms.hosts.mine[place]
        envelope = posted.envelope
        if envelope is None:
            return None, -1
        if envelope.nbytes != tensor.nbytes or envelope.dtype != dtype_code(tensor.dtype):
            self.queue.put_back(envelope)
            raise self._mismatch(envelope, tensor)
        if not envelope.nbytes:
            return finished(), envelope.source
        return comms.mesh.recv(tensor, envelope.source, envelope.number, True), envelope.source

    def _mismatch(self, envelope: Envelope, tensor: torch.Tensor) -> Desync:
        here = f"recv of {tensor.nbytes} bytes, dtype {tensor.dtype}"
        there = f"send of {envelope.nbytes} bytes, dtype number {envelope.dtype}"
        rank = self.comms.hosts.rank
        return Desync(
            "a message is not what its receive expects",
            group=self.comms.state.name,
            op="recv",
            rank=rank,
            world_size=self.comms.hosts.size,
            peer=envelope.source,
            calls={rank: here, envelope.source: there},
            seen=f"{here} here, {there} on rank {envelope.source}",
            fix="Receive into a tensor of the length and dtype that are sent; "
            "the message is kept for a receive that fits.",
        )

    def examine(self, request: _ReceiveRequest) -> None:
        """Look whether a receive that was not answered can be."""
        comms = self.comms
        comms.state.check("recv")
        if comms.state.left.is_set():
            raise comms.state.error("recv")
        if request.waited_s > comms.timeout_s:
            peer = request.posted.source
            request.give_up(
                CommTimeout(
                    "no message came in time",
                    group=comms.state.name,
                    op="recv",
                    rank=comms.hosts.rank,
                    world_size=comms.hosts.size,
                    peer=peer,
                    missing=() if peer is None else (peer,),
                    elapsed_s=request.waited_s,
                    seen=f"the timeout of {comms.timeout_s:g} s passed",
                    fix="See what the sender does, or raise the group's timeout.",
                )
            )

    def _guarded(self, op: str, call: Callable[[], Request | None]) -> Request | None:
        try:
            return call()
        except DureError as e:
            if self.comms.state.look() is not None:
                raise self.comms.state.error(op) from e
            raise

    # ---- the receive thread ----------------------------------------------------------------------

    def _start_receive_thread(self) -> None:
        with self._lock:
            if self._receive_thread is None:
                self._receive_thread = threading.Thread(
                    target=self._serve, name="dure-receive", daemon=True
                )
                self._receive_thread.start()

    def _serve(self) -> None:
        head = bytearray(_ENVELOPE.size)
        memory = torch.frombuffer(head, dtype=torch.uint8)
        with suppress(DureError):  # the group was left or is broken: whoever waits looks himself
            while not self.comms.state.left.is_set():
                request = self.comms.mesh.recv(memory, None, self._envelope_tag, True)
                request.wait()
                self.queue.deliver(Envelope(request.source, *_ENVELOPE.unpack(head)))


def _attend(request: _ReceiveRequest) -> None:
    with suppress(DureError):  # whoever waits sees it, too
        request.await_answer(None)


def _await(comms: SubComms, request: Request, op: str, until: float | None) -> bool:
    """Wait for a part of a message; True if it ended, False when it is `until`."""
    while True:
        left_s = _LOOK_S if until is None else min(_LOOK_S, max(0.0, until - time.monotonic()))
        try:
            if request.wait(left_s):
                return True
        except DureError as e:
            if isinstance(e, (CommTimeout, Desync)) and comms.state.look() is None:
                raise
            raise comms.state.blame(e, op) from e
        comms.state.check(op)
        if until is not None and time.monotonic() >= until:
            return False
