"""Who is lost: what the agent whose server holds the store looks at (see `pulse`)."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass

import zmq

from dure.launch.agent.events import Event, Joined, Lost
from dure.store.address import resolve
from dure.store.base import Store
from dure.store.connection import Connection, knock
from dure.store.key import JobKey

__all__ = ["Heartbeat", "Watch", "beat_key", "refuses"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """How the agents watch each other, in seconds.

    `beat_s`: between two beats; `lost_s`: a silent agent is given up; `fence_s`: an agent that
    reaches nobody ends its own workers, before others give it up; `look_s`: between two looks of
    the leader at its connections; `knock_s`: for a standby to answer.
    """

    beat_s: float = 1.0
    lost_s: float = 5.0
    fence_s: float = 4.0
    look_s: float = 0.2
    knock_s: float = 1.0


def beat_key(agent: str) -> str:
    """Return where an agent's beats are in the store."""
    return f"dure/agents/beat/{agent}"


def refuses(address: str, limit_s: float) -> bool:
    """Tell whether the machine at "host:port" says itself that nobody listens there any more."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), limit_s).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


class Watch:
    """What the leader knows of the other agents.

    Args:
        key: The job key.
        heart: How to watch.

    Threads: the follower's alone.
    """

    def __init__(self, key: JobKey, heart: Heartbeat) -> None:
        self._key, self.heart = key, heart
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._homes: dict[str, str] = {}  # agent to its standby
        self._lines: dict[str, Connection] = {}
        self._beats: dict[str, tuple[bytes, float]] = {}
        self._heard: set[str] = set()  # who has beaten since the beginning
        self._closed: set[str] = set()  # standbys that cannot be reached: beats must do
        self._look_at = 0.0

    def note(self, event: Event, me: str) -> None:
        """Follow who comes and is lost."""
        if isinstance(event, Joined) and event.agent != me:
            self._homes[event.agent] = event.store
        elif isinstance(event, Lost):
            self._forget(event.agent)

    def held(self, addresses: tuple[str, ...]) -> list[tuple[str, str]]:
        """Return the agents whose rungs are among `addresses`, each with its rung."""
        return [(agent, home) for agent, home in self._homes.items() if home in addresses]

    def begin(self) -> None:
        """Give everybody time to be heard again."""
        self._beats.clear()
        self._heard.clear()

    @property
    def sure(self) -> bool:
        """Whether all who are not lost have been heard since the beginning."""
        return self._homes.keys() <= self._heard

    def lost(self, store: Store) -> list[Lost]:
        """Return who is lost now, and why."""
        broken = [agent for agent in list(self._homes) if not self._is_there(agent)]
        found = [Lost(agent, "its launcher has ended") for agent in broken]
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + self.heart.beat_s
            for agent in list(self._homes):
                if agent not in broken and self._is_silent(agent, store, now):
                    why = f"nothing was heard of it for {self.heart.lost_s:g} s"
                    found.append(Lost(agent, why, silent=True))
        for event in found:
            self._forget(event.agent)
        return found

    def close(self) -> None:
        """Hang up."""
        for agent in list(self._lines):
            self._forget(agent)
        self._context.term()

    def _is_there(self, agent: str) -> bool:
        line = self._lines.get(agent)
        if agent in self._closed or (line is not None and not line.broken):
            return True
        if line is not None:
            del self._lines[agent]
            line.close()
        host, _, port = self._homes[agent].rpartition(":")
        endpoint = resolve(host.strip("[]"), int(port), "a host of the job").endpoint
        opened = knock(self._context, endpoint, self._key, self.heart.knock_s)
        if opened is not None:
            self._lines[agent] = opened
        elif line is None:
            self._closed.add(agent)
        return opened is not None or line is None

    def _is_silent(self, agent: str, store: Store, now: float) -> bool:
        key = beat_key(agent)
        beat = store.get(key) if store.check([key]) else b""
        last, since = self._beats.get(agent, (None, now))
        if beat != last:
            self._beats[agent] = beat, now
            if last is not None:
                self._heard.add(agent)
            return False
        return now - since > self.heart.lost_s

    def _forget(self, agent: str) -> None:
        self._homes.pop(agent, None)
        self._beats.pop(agent, None)
        self._heard.discard(agent)
        line = self._lines.pop(agent, None)
        if line is not None:
            line.close()
