"""The smallest agent over a transport: asks others for something, and answers."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch

from dure.errors import PeerLost, RpcError
from dure.rpc.envelope import Envelope, Kind, Waiter, Work
from dure.rpc.meeting import Meeting, connect
from dure.rpc.message import Body
from dure.rpc.transport import HostTransport
from waiting import PATIENCE_S

Answer = tuple[bytes, Sequence[torch.Tensor]]


@dataclass
class Asked:
    """A question that is not answered yet."""

    to: int
    ticket: Waiter
    answer: Answer | Exception | None = None


@dataclass
class Echo:
    """Asks, and answers with what `functions` say; with what was sent, if they do not know it."""

    transport: HostTransport
    functions: dict[bytes, Callable[[int, Answer], Answer]] = field(default_factory=dict)
    broke: list[int] = field(default_factory=list)
    ended: dict[int, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.me = self.transport.peers.own_id
        self._lock, self._number = threading.Lock(), 0
        self._asked: dict[int, Asked] = {}
        self._ends: dict[int, Future[str]] = {}
        self.transport.start(self)

    def ask(
        self, to: int, what: bytes = b"", memories: Sequence[torch.Tensor] | None = None
    ) -> Asked:
        with self._lock:
            number = self._number = self._number + 1
            asked = self._asked[number] = Asked(to, self.transport.ticket())
        envelope = Envelope(Kind.CALL, self.me, number, body=Body(what))
        try:
            self.transport.send(to, envelope, memories or [])
        except PeerLost as error:
            self._end(number, error)
        return asked

    def answer(self, asked: Asked) -> Answer:
        assert self.transport.wait(asked.ticket, PATIENCE_S), "no answer"
        assert asked.answer is not None
        if isinstance(asked.answer, Exception):
            raise asked.answer
        return asked.answer

    def get(
        self, to: int, what: bytes = b"", memories: Sequence[torch.Tensor] | None = None
    ) -> Answer:
        return self.answer(self.ask(to, what, memories))

    def end_of(self, peer: int) -> str:
        """Wait for the end of a process; return how it ended."""
        with self._lock:
            end = self._ends.setdefault(peer, Future())
        return end.result(PATIENCE_S)

    def receive(self, envelope: Envelope, memories: Sequence[torch.Tensor]) -> Work | None:
        if envelope.kind == Kind.ANSWER:
            self._end(envelope.number, (envelope.body.pickled, memories))
            return None
        return lambda *error: (
            self.refused.append(str(error[0])) if error else self._serve(envelope, memories)
        )

    def _serve(self, envelope: Envelope, memories: Sequence[torch.Tensor]) -> None:
        what, name = envelope.body.pickled, envelope.body.pickled.partition(b" ")[0]
        function = self.functions.get(name, lambda _, question: question)
        pickled, given = function(envelope.sender, (what, memories))
        answer = Envelope(Kind.ANSWER, self.me, envelope.number, body=Body(pickled))
        with suppress(PeerLost):
            self.transport.send(envelope.sender, answer, given)

    def broken(self, id: int) -> None:
        self.broke.append(id)
        self._end_all(id, RpcError("may have run"))

    def died(self, id: int, how: str) -> None:
        assert id not in self.ended
        self.ended[id] = how
        self._end_all(id, PeerLost("gone", peer=id, exit=how))
        with self._lock:
            end = self._ends.setdefault(id, Future())
        end.set_result(how)

    def joined(self, id: int, name: str) -> None:
        self.names[id] = name

    def _end_all(self, peer: int, error: Exception) -> None:
        with self._lock:
            numbers = [number for number, asked in self._asked.items() if asked.to == peer]
        for number in numbers:
            self._end(number, error)

    def _end(self, number: int, answer: Answer | Exception) -> None:
        with self._lock:
            asked = self._asked.pop(number, None)
        if asked is not None:
            asked.answer = answer
            self.transport.complete(asked.ticket)


def echo(url: str, rank: int, world_size: int | None, **options: object) -> Echo:
    """Join at `url` as "w0", "w1", ... (or `name`), and return the agent."""
    name = str(options.pop("name", f"w{rank}"))
    slots = int(str(options.pop("slots", 4)))
    meeting = Meeting(
        name=name,
        rank=rank,
        world_size=world_size,
        init_method=url,
        timeout=timedelta(seconds=PATIENCE_S),
    )
    return Echo(connect(meeting, slots, **options))  # pyright: ignore[reportArgumentType]


def numbered(nbytes: int, number: int) -> torch.Tensor:
    """Return memory whose bytes are told by a number."""
    return (torch.arange(nbytes, dtype=torch.int64) * 31 + number).to(torch.uint8)


def digest(memories: Sequence[torch.Tensor]) -> bytes:
    """Return what tells memories apart."""
    summed = hashlib.blake2b(digest_size=16)
    for memory in memories:
        summed.update(len(memory).to_bytes(8, "little"))
        summed.update(memory.numpy().tobytes())
    return summed.digest()
