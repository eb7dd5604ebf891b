"""Point-to-point in a hybrid group: shared memory inside the host, the mesh between hosts.

An engine cannot report which messages have arrived, nor cancel a receive; but a receive from any
rank may get its message from this host or another. So each message between hosts is announced by an
*envelope* (number, tag, bytes, dtype) under a separate tag, and the *receive thread* receives
envelopes from all ranks and matches them with posted receives. Once a receive has an envelope that
fits, it receives the message from the engine, with the number as its tag. Messages of one pair and
tag are matched in the order of their envelopes, which the engine keeps. A receive from any rank
also polls shared memory.

The receive thread is started by the first receive that may concern other hosts.

Cost:
    One more message of 32 bytes for every message between hosts; none inside a host.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from dure.comm.backends.hybrid.subcomms import ANNOUNCING_TAG, NUM_NUMBERS, SubComms
from dure.comm.backends.matching import Matching
from dure.comm.backends.request import Request
from dure.comm.codes import dtype_code
from dure.errors import CommTimeout, Desync, DureError

__all__ = ["Envelope", "Message", "Messages"]

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


class Message(Request):
    """A pending message: a send or a receive.

    Args:
        messages: Those of its rank.
        op: "send" or "recv".
        peer: The other end; None for a receive from any rank.
        tag: The message's.
        tensor: The tensor to send, or to receive into.

    Attributes:
        known: Set when the sender is known.
        requests: The requests of shared memory or the engine that transfer it; None until the
            sender is known.
    """

    __slots__ = ("_messages", "began", "known", "op", "peer", "requests", "tag", "tensor")

    def __init__(
        self, messages: Messages, op: str, peer: int | None, tag: int, tensor: torch.Tensor
    ) -> None:
        super().__init__()
        self._messages, self.op, self.peer, self.tag, self.tensor = messages, op, peer, tag, tensor
        self.began = time.monotonic()
        self.known = threading.Event()
        self.requests: list[Request] | None = None

    def carry(self, source: int, requests: list[Request]) -> None:
        """Set the requests that transfer it, and the sender of a receive."""
        self.source, self.requests = source, requests
        self.known.set()

    def _poll(self) -> None:
        self._await(time.monotonic())

    def _await(self, limit: float | None) -> bool:
        comms = self._messages.comms
        try:
            if not self.await_source(limit):
                return False
            for request in self.requests or ():
                if not comms.wait_until(request, self.op, limit):
                    return False
        except DureError as e:
            own = isinstance(e, (CommTimeout, Desync)) and comms.state.look() is None
            self.end(e if own or self.requests is None else comms.state.blame(e, self.op))
        self.end(None)
        return True

    def await_source(self, limit: float | None) -> bool:
        """Wait until the sender is known; return False at `limit`."""
        nap_s = _NAP_S if self.peer is None else _LOOK_S
        while not self.known.is_set():
            self._messages.examine(self)
            left_s = nap_s if limit is None else min(nap_s, limit - time.monotonic())
            if not self.known.wait(max(0.0, left_s)) and left_s <= 0:
                return False
        return True


class Messages:
    """The messages of one rank. Threads: every method, from any thread.

    Args:
        comms: The group's parts.
    """

    def __init__(self, comms: SubComms) -> None:
        self.comms = comms
        self._lock = threading.Lock()  # guards the fields below
        self._sent: defaultdict[int, int] = defaultdict(int)
        self._matching = Matching[Message, Envelope](_meets, _fits, self._refuse)
        self._receive_thread: threading.Thread | None = None

    def send(self, tensor: torch.Tensor, dst: int, tag: int, async_op: bool) -> Request | None:
        comms = self.comms
        comms.state.check("send")
        host, place = comms.hosts.places[dst]
        if host == comms.hosts.here:
            return self._inside("send", lambda: comms.local.send(tensor, place, tag, async_op))
        message = Message(self, "send", dst, tag, tensor)
        with self._lock:
            number = self._sent[dst] = (self._sent[dst] + 1) % NUM_NUMBERS
            head = _ENVELOPE.pack(number, tag, tensor.nbytes, dtype_code(tensor.dtype))
            envelope = torch.frombuffer(bytearray(head), dtype=torch.uint8)
            requests = [comms.mesh.send(envelope, dst, ANNOUNCING_TAG, True)]
            if tensor.numel():
                requests.append(comms.mesh.send(tensor, dst, number, True))
        message.carry(-1, [c for c in requests if c is not None])
        if async_op:
            return message
        message.wait()
        return None

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> Request:
        comms = self.comms
        comms.state.check("recv")
        message = Message(self, "recv", src, tag, tensor)
        host, place = (None, 0) if src is None else comms.hosts.places[src]
        if src is not None and host == comms.hosts.here:
            request = self._inside("recv", lambda: comms.local.recv(tensor, place, tag, async_op))
            message.carry(src, [request] if async_op and request is not None else [])
            return message
        self._post(message)
        if not async_op:
            message.wait()
        elif src is None:  # shared memory must be polled
            threading.Thread(target=_attend, args=(message,), name="dure-recv", daemon=True).start()
        return message

    def _inside(self, op: str, call: Callable[[], Request | None]) -> Request | None:
        """Run a call in shared memory; if the group is broken, raise the group's error."""
        try:
            return call()
        except DureError:
            if self.comms.state.look() is not None:
                raise self.comms.state.error(op) from None
            raise

    # ---- matching --------------------------------------------------------------------------------

    def _post(self, message: Message) -> None:
        """Match a receive with its envelope, or keep it until one arrives."""
        with self._lock:
            if self._receive_thread is None:
                self._receive_thread = threading.Thread(
                    target=self._serve, name="dure-receive", daemon=True
                )
                self._receive_thread.start()
            envelope = self._matching.post(message)
            if envelope is not None:
                self._answer(message, envelope)

    def _serve(self) -> None:
        """Run the receive thread: match each envelope with its receive."""
        head = bytearray(_ENVELOPE.size)
        memory = torch.frombuffer(head, dtype=torch.uint8)
        with suppress(DureError):  # the group was left or is broken; waiting threads check that too
            while not self.comms.state.left.is_set():
                request = self.comms.mesh.recv(memory, None, ANNOUNCING_TAG, True)
                request.wait()
                envelope = Envelope(request.source, *_ENVELOPE.unpack(head))
                with self._lock:
                    message = self._matching.arrive(envelope)
                    if message is not None:
                        self._answer(message, envelope)

    def _answer(self, message: Message, envelope: Envelope) -> None:
        """Receive the message that an envelope announces."""
        tensor = message.tensor
        requests: list[Request] = []
        try:
            if envelope.nbytes:
                request = self.comms.mesh.recv(tensor, envelope.source, envelope.number, True)
                requests.append(request)
        except DureError as e:
            return self._fail(message, e)
        message.carry(envelope.source, requests)

    def _fail(self, message: Message, error: DureError) -> None:
        message.end(error)
        message.known.set()

    def _refuse(self, message: Message, envelope: Envelope) -> None:
        """Fail a receive whose message does not fit."""
        tensor = message.tensor
        here = f"recv of {tensor.nbytes} bytes, dtype {tensor.dtype}"
        there = f"send of {envelope.nbytes} bytes, dtype number {envelope.dtype}"
        rank = self.comms.hosts.rank
        self._fail(
            message,
            Desync(
                "a message does not match its receive",
                **self.comms.state.where("recv"),
                peer=envelope.source,
                calls={rank: here, envelope.source: there},
                seen=f"{here} here, {there} on rank {envelope.source}",
                fix="Receive into a tensor of the length and dtype that are sent; "
                "the message is kept for a receive that fits.",
            ),
        )

    def examine(self, message: Message) -> None:
        """Check for other events that end the wait for an envelope.

        Raises:
            CommError: The group is broken or was left.
        """
        comms, peer = self.comms, message.peer
        comms.state.check("recv")
        if comms.state.left.is_set():
            raise comms.state.error("recv")
        waited_s = time.monotonic() - message.began
        with self._lock:
            if message not in self._matching.receives:
                return
            place = comms.local.group.sender_of(message.tag) if peer is None else -1
            if place < 0 and waited_s <= comms.state.timeout_s:
                return
            self._matching.receives.remove(message)
            if place >= 0:
                request = comms.local.recv(message.tensor, place, message.tag, True)
                message.carry(comms.hosts.mine[place], [request])
                return
        self._fail(
            message,
            CommTimeout(
                "no message arrived in time",
                **comms.state.where("recv", began=message.began),
                peer=peer,
                missing=() if peer is None else (peer,),
                seen=f"the timeout of {comms.state.timeout_s:g} s passed",
                fix="Check what the sender does, or raise the group's timeout.",
            ),
        )


def _meets(message: Message, envelope: Envelope) -> bool:
    return message.tag == envelope.tag and message.peer in (None, envelope.source)


def _fits(message: Message, envelope: Envelope) -> bool:
    tensor = message.tensor
    return envelope.nbytes == tensor.nbytes and envelope.dtype == dtype_code(tensor.dtype)


def _attend(message: Message) -> None:
    with suppress(DureError):  # waiting threads raise it
        message.await_source(None)
