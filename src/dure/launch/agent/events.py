"""What happens to a job, as agents tell it to each other: the entries of the job's log.

An event is a small value with a fixed shape. It is packed with msgpack and read back with every
field checked; nothing is unpickled. Times are not part of it: an agent whose clock runs out says so
(`Expired`), and that, too, is an event, so that nobody needs the others' clocks.
"""

from __future__ import annotations

import msgspec

from dure.launch.spec import RankResult

__all__ = [
    "Ended",
    "Event",
    "Expired",
    "Failed",
    "Finished",
    "Joined",
    "Left",
    "Lost",
    "Ready",
    "Refused",
    "Succeeded",
    "pack_event",
    "read_event",
]


class Joined(msgspec.Struct, array_like=True, frozen=True, tag="joined"):
    """An agent came, with `nproc` ranks on `host`.

    `node_rank` is what its user fixed; `store` is its rung of the ladder (`dure.store.ladder`).
    """

    agent: str
    host: str
    nproc: int
    node_rank: int | None = None
    store: str = ""


class Left(msgspec.Struct, array_like=True, frozen=True, tag="left"):
    """An agent takes its leave: it was told to (128 + signal), or cannot go on (1)."""

    agent: str
    code: int
    why: str = ""


class Lost(msgspec.Struct, array_like=True, frozen=True, tag="lost"):
    """An agent has died, or nothing was heard of it for too long.

    `silent`: nothing says that it has died; the network may be cut (`dure.store.quorum`).
    """

    agent: str
    why: str = ""
    silent: bool = False


class Refused(msgspec.Struct, array_like=True, frozen=True, tag="refused"):
    """A host did not come to join, for it was told other things than the first."""

    host: str
    why: str


class Ready(msgspec.Struct, array_like=True, frozen=True, tag="ready"):
    """The first agent of a round keeps a port for rank 0."""

    agent: str
    round: int
    master_addr: str
    master_port: int


class Failed(msgspec.Struct, array_like=True, frozen=True, tag="failed"):
    """A worker failed; what is known of it at that moment."""

    agent: str
    round: int
    local_rank: int
    worker: RankResult


class Finished(msgspec.Struct, array_like=True, frozen=True, tag="finished"):
    """One worker of an elastic job ended well."""

    agent: str
    round: int
    local_rank: int


class Succeeded(msgspec.Struct, array_like=True, frozen=True, tag="succeeded"):
    """All workers of an agent ended well, and nothing of the round is left there."""

    agent: str
    round: int


class Ended(msgspec.Struct, array_like=True, frozen=True, tag="ended"):
    """Nothing of a round that is stopped is left on an agent's host; `ranks` tells what became."""

    agent: str
    round: int
    ranks: tuple[RankResult, ...] = ()


class Expired(msgspec.Struct, array_like=True, frozen=True, tag="expired"):
    """A time has passed which the machine asked to be told of."""

    timer: str


Event = Joined | Left | Lost | Refused | Ready | Failed | Finished | Succeeded | Ended | Expired

pack_event = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
read_event = _decoder.decode
