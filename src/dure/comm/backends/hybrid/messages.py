"""Point-to-point in a hybrid group: shared memory inside the host, the mesh between hosts.

An engine cannot say what has arrived, nor take back a receive; yet a receive from anyone may be
answered from either side. So each message between hosts is announced by an *envelope* (number, tag,
bytes, dtype) under a tag of its own, and a thread of the receiver, the *postman*, takes envelopes
from anyone. As soon as a receive has an envelope that fits, the engine is asked for the message,
whose tag at the engine is its number. Messages of one pair and tag are matched in the order of
their envelopes, which the engine keeps. A receive from anyone also looks, between naps, whether
shared memory has a message for it.

The postman begins with the first receive that concerns other hosts.

Cost: one more message of 32 bytes for every message between hosts; none inside a host.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress

import torch

from dure.comm.backends.base import Ticket
from dure.comm.backends.hybrid.letters import Box, Letter, Wanted
from dure.comm.backends.hybrid.links import Links
from dure.comm.backends.shm.backend import dtype_code
from dure.errors import CommTimeout, Desync, DureError

__all__ = ["Messages"]

_ENVELOPE = struct.Struct("<QQQQ")
_NAP_S = 0.0005
_LOOK_S = 0.05


class _SendTicket:
    """A pending message to another host: its envelope and its bytes."""

    source = -1

    def __init__(self, links: Links, peer: int, parts: list[Ticket | None], keep: object) -> None:
        self._links, self._peer, self._parts, self._keep = links, peer, parts, keep

    def done(self) -> bool:
        """See `Ticket.done`."""
        return all(p is None or p.done() for p in self._parts)

    def wait(self, timeout_s: float | None = None) -> bool:
        """See `Ticket.wait`."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        for part in self._parts:
            if not _await(self._links, part, "send", self._peer, until):
                return False
        self._keep = None
        return True


class _ReceiveTicket:
    """A pending receive that another host may answer."""

    def __init__(
        self, messages: Messages, tensor: torch.Tensor, source: int | None, tag: int
    ) -> None:
        self._messages, self._tensor = messages, tensor
        self._wanted = Wanted(source, tag, self._begin)
        self._lock = threading.Lock()
        self._inner: Ticket | None = None
        self._local_from: int | None = None
        self._error: DureError | None = None
        self._began = time.monotonic()

    @property
    def source(self) -> int:
        """See `Ticket.source`."""
        if self._local_from is not None:
            return self._local_from
        return -1 if self._wanted.letter is None else self._wanted.letter.source

    def done(self) -> bool:
        """See `Ticket.done`."""
        self._begin()
        return self._error is not None or (self._inner is not None and self._inner.done())

    def wait(self, timeout_s: float | None = None) -> bool:
        """See `Ticket.wait`."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        if not self.await_answer(until):
            return False
        peer = self._wanted.source
        return _await(self._messages.links, self._inner, "recv", peer, until)

    def post(self) -> None:
        """Ask for the message."""
        self._messages.box.post(self._wanted)

    def await_answer(self, until: float | None) -> bool:
        """Wait until it is known where the message comes from; False when it is `until`."""
        looked = time.monotonic()
        while self._inner is None:
            self._begin()
            if self._error is not None:
                raise self._error
            if self._inner is not None:
                break
            now = time.monotonic()
            if until is not None and now >= until:
                return False
            if now - looked > _LOOK_S:
                looked = now
                self._messages.examine(self)
            nap = _NAP_S if self._wanted.source is None else _LOOK_S
            self._wanted.found.wait(nap if until is None else min(nap, max(0.0, until - now)))
        return True

    def _begin(self) -> None:
        """Begin to receive, if it is known from where."""
        with self._lock:
            if self._inner is not None or self._error is not None:
                return
            try:
                self._inner, self._local_from = self._messages.answer(self._wanted, self._tensor)
            except DureError as e:
                self._error = e

    def give_up(self, error: DureError) -> None:
        """End with `error`, unless an answer has come."""
        with self._lock:
            if self._inner is None and self._messages.box.withdraw(self._wanted):
                self._error = error
                raise error

    @property
    def waited_s(self) -> float:
        """Seconds since it was posted."""
        return time.monotonic() - self._began

    @property
    def peer(self) -> int | None:
        """Whose message it wants."""
        return self._wanted.source


class Messages:
    """The messages of one rank. Threads: every method, from any thread.

    Args:
        links: The group's parts.
    """

    def __init__(self, links: Links) -> None:
        self.links, self.box = links, Box()
        self._lock = threading.Lock()
        _, self._envelope_tag, self._num_numbers = links.mesh_tags
        self._sent: defaultdict[int, int] = defaultdict(int)
        self._postman: threading.Thread | None = None

    def send(self, tensor: torch.Tensor, dst: int, tag: int, async_op: bool) -> Ticket | None:
        """See `Backend.send`."""
        links = self.links
        links.fate.check("send")
        host, place = links.hosts.place_of(dst)
        if host == links.here:
            call = lambda: links.local.send(tensor, place, tag, async_op)  # noqa: E731
            return self._guarded("send", call)
        with self._lock:
            number = self._sent[dst] = (self._sent[dst] + 1) % self._num_numbers
            head = _ENVELOPE.pack(number, tag, tensor.nbytes, dtype_code(tensor.dtype))
            envelope = torch.frombuffer(bytearray(head), dtype=torch.uint8)
            parts = [links.mesh.send(envelope, dst, self._envelope_tag, True)]
            if tensor.numel():
                parts.append(links.mesh.send(tensor, dst, number, True))
        ticket = _SendTicket(links, dst, parts, envelope)
        if async_op:
            return ticket
        ticket.wait()
        return None

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> Ticket:
        """See `Backend.recv`."""
        links = self.links
        links.fate.check("recv")
        if src is not None:
            host, place = links.hosts.place_of(src)
            if host == links.here:
                call = lambda: links.local.recv(tensor, place, tag, async_op)  # noqa: E731
                return _Renumbered(self._guarded("recv", call), src, links)
        self._start_postman()
        ticket = _ReceiveTicket(self, tensor, src, tag)
        ticket.post()
        if not async_op:
            ticket.wait()
        elif src is None:  # somebody must look into shared memory
            threading.Thread(target=_attend, args=(ticket,), name="dure-recv", daemon=True).start()
        return ticket

    def answer(self, wanted: Wanted, tensor: torch.Tensor) -> tuple[Ticket | None, int | None]:
        """Begin to receive what `wanted` asks for, if it is there.

        Returns:
            The ticket, and the sender where it is on this host.
        """
        links = self.links
        if wanted.letter is None and wanted.source is None:
            place = links.local.sender_of(wanted.tag)
            if place >= 0 and self.box.withdraw(wanted):
                ticket = links.local.recv(tensor, place, wanted.tag, True)
                return ticket, links.hosts.mine[place]
        letter = wanted.letter
        if letter is None:
            return None, None
        if letter.nbytes != tensor.nbytes or letter.dtype != dtype_code(tensor.dtype):
            self.box.put_back(letter)
            raise self._mismatch(letter, tensor)
        if not letter.nbytes:
            return _NOTHING, None
        return links.mesh.recv(tensor, letter.source, letter.number, True), None

    def _mismatch(self, letter: Letter, tensor: torch.Tensor) -> Desync:
        here = f"recv of {tensor.nbytes} bytes, dtype {tensor.dtype}"
        there = f"send of {letter.nbytes} bytes, dtype number {letter.dtype}"
        rank = self.links.hosts.rank
        return Desync(
            "a message is not what its receive expects",
            group=self.links.fate.name,
            op="recv",
            rank=rank,
            world_size=self.links.hosts.size,
            peer=letter.source,
            calls={rank: here, letter.source: there},
            seen=f"{here} here, {there} on rank {letter.source}",
            fix="Receive into a tensor of the length and dtype that are sent; "
            "the message is kept for a receive that fits.",
        )

    def examine(self, ticket: _ReceiveTicket) -> None:
        """Look whether a receive that was not answered can be."""
        links = self.links
        links.fate.check("recv")
        if links.fate.left.is_set():
            raise links.fate.error("recv")
        if ticket.waited_s > links.timeout_s:
            peer = ticket.peer
            ticket.give_up(
                CommTimeout(
                    "no message came in time",
                    group=links.fate.name,
                    op="recv",
                    rank=links.hosts.rank,
                    world_size=links.hosts.size,
                    peer=peer,
                    missing=() if peer is None else (peer,),
                    elapsed_s=ticket.waited_s,
                    seen=f"the timeout of {links.timeout_s:g} s passed",
                    fix="See what the sender does, or raise the group's timeout.",
                )
            )

    def _guarded(self, op: str, call: Callable[[], Ticket | None]) -> Ticket | None:
        try:
            return call()
        except DureError as e:
            if self.links.fate.look() is not None:
                raise self.links.fate.error(op) from e
            raise

    # ---- the postman -----------------------------------------------------------------------------

    def _start_postman(self) -> None:
        with self._lock:
            if self._postman is None:
                self._postman = threading.Thread(
                    target=self._serve, name="dure-postman", daemon=True
                )
                self._postman.start()

    def _serve(self) -> None:
        head = bytearray(_ENVELOPE.size)
        memory = torch.frombuffer(head, dtype=torch.uint8)
        with suppress(DureError):  # the group was left or is broken: whoever waits looks himself
            while not self.links.fate.left.is_set():
                ticket = self.links.mesh.recv(memory, None, self._envelope_tag, True)
                ticket.wait()
                self.box.deliver(Letter(ticket.source, *_ENVELOPE.unpack(head)))

    def close(self) -> None:
        """Nothing to do: closing the mesh ends the postman."""


def _attend(ticket: _ReceiveTicket) -> None:
    with suppress(DureError):  # whoever waits sees it, too
        ticket.await_answer(None)


class _Nothing:
    """The ticket of a message without bytes."""

    source = -1

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        del timeout_s
        return True


_NOTHING = _Nothing()


class _Renumbered:
    """A receive inside the host, whose sender has another number in the group."""

    def __init__(self, ticket: Ticket | None, source: int, links: Links) -> None:
        assert ticket is not None
        self._ticket, self.source, self._links = ticket, source, links

    def done(self) -> bool:
        """See `Ticket.done`."""
        return self._ticket.done()

    def wait(self, timeout_s: float | None = None) -> bool:
        """See `Ticket.wait`."""
        return _await(self._links, self._ticket, "recv", self.source, timeout_s)


def _await(
    links: Links, ticket: Ticket | None, op: str, peer: int | None, until: float | None
) -> bool:
    """Wait for a part of a message; True if it ended, False when it is `until`."""
    if ticket is None:
        return True
    while True:
        left = _LOOK_S if until is None else min(_LOOK_S, max(0.0, until - time.monotonic()))
        try:
            if ticket.wait(left):
                return True
        except DureError as e:
            if isinstance(e, (CommTimeout, Desync)) and links.fate.look() is None:
                raise
            raise links.fate.blame(e, op) from e
        links.fate.check(op)
        if until is not None and time.monotonic() >= until:
            return False
