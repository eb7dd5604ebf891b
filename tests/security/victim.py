"""A server in a process of its own, with a genuine client beside it, to be attacked."""

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import psutil

from dure.store import JobKey, TCPStore
from dure.store.key import mint
from procs.store_programs import Program, line, running
from waiting import key_file, until

SERVER = """
import logging
from dure.store import tracker, wire
logging.basicConfig(filename=args[0], level=logging.WARNING, format="%(message)s")
for module, names in json.loads(args[1]).items():
    for name, value in names.items():
        setattr({"tracker": tracker, "wire": wire}[module], name, value)
store = TCPStore("127.0.0.1", 0, is_master=True)
say(store.port)
sys.stdin.readline()
store.close()
"""

BYSTANDER_BREAK_S = 0.002


@dataclass
class Bystander:
    """A genuine client that works while the server is attacked."""

    store: TCPStore
    calls: int = 0
    longest_s: float = 0.0
    error: BaseException | None = None
    _over: threading.Event = field(default_factory=threading.Event)
    _began: threading.Event = field(default_factory=threading.Event)

    def work(self) -> None:
        try:
            while not self._over.wait(BYSTANDER_BREAK_S):
                self._began.set()
                start = time.perf_counter()
                self.calls += 1
                assert self.store.add("bystander", 1) > 0
                self.longest_s = max(self.longest_s, time.perf_counter() - start)
        except BaseException as error:
            self.error = error

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        thread = threading.Thread(target=self.work)
        thread.start()
        self._began.wait(30)
        try:
            yield
        finally:
            self._over.set()
            thread.join(30)


@dataclass
class Victim:
    """The server: its process, port and key, and what it writes into its log."""

    program: Program
    port: int
    key: JobKey
    log: Path
    _read: int = 0

    @property
    def rss_mib(self) -> float:
        return psutil.Process(self.program.pid).memory_info().rss / 2**20

    def has_at_most(self, descriptors: int) -> None:
        """The server has so few open, as soon as ZeroMQ has closed what was shut."""
        process = psutil.Process(self.program.pid)
        until(lambda: process.num_fds() <= descriptors, "descriptors to be closed")

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    def client(self) -> TCPStore:
        return TCPStore("127.0.0.1", self.port, timeout=timedelta(seconds=20), key=self.key)

    def lines_about(self, what: str) -> list[str]:
        """The log's lines with `what` in them, when there are some."""
        return until(
            lambda: [text for text in self.lines() if what in text],
            lambda: f"{what} in the log: {self.lines()[-5:]}",
        )

    def refused(self) -> tuple[int, str]:
        """How many were refused since this was asked last, at least one; and the lines about it.

        Who left at once has no name in them.
        """
        until(lambda: len(self.lines()) > self._read, "somebody who is refused")
        time.sleep(0.2)  # the rest comes within `QUIET_S`
        lines = self.lines()[self._read :]
        self._read += len(lines)
        more = [re.search(r" and (\d+) more: ", text) for text in lines]
        return sum(1 + int(each[1] if each else 0) for each in more), "\n".join(lines)

    @contextlib.contextmanager
    def under_attack(self, room_mib: float = 16, patience_s: float = 2) -> Iterator[Bystander]:
        """Attack inside: a genuine client works meanwhile, and memory stays what it was."""
        store = self.client()
        before = self.rss_mib
        bystander = Bystander(store)
        with bystander.working():
            yield bystander
        grown = self.rss_mib - before
        store.close()
        newcomer = self.client()
        newcomer.set("after", "the attack")
        newcomer.close()
        assert bystander.error is None, bystander.error
        assert bystander.calls > 0
        assert bystander.longest_s < patience_s
        assert grown < room_mib, f"{grown:.1f} MiB more"


@contextlib.contextmanager
def victim(folder: Path, **settings: dict[str, float]) -> Iterator[Victim]:
    """A server with its own key; `settings` changes numbers of `tracker` and `wire`."""
    key = mint()
    path = key_file(folder / "key", key.raw)
    log = folder / "log"
    log.touch()
    code = "import json\n" + SERVER
    with running((code, str(log), json.dumps(settings)), DURE_JOB_KEY_FILE=path) as (program,):
        yield Victim(program, int(line(program)), key, log)
        assert program.poll() is None, "the server has ended"
        if os.environ.get("SHOW_LOG"):
            print(log.read_text())
