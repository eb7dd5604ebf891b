"""A server in a process of its own, with a genuine client beside it, to be attacked."""

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from dure.store import JobKey, TCPStore
from dure.store.key import mint
from tests.store.procs.store_programs import Program, line, running
from tests.waiting import PATIENCE_S, key_file, until

SERVER = """
import logging
from dure.store import router
logging.basicConfig(filename=args[0], level=logging.WARNING, format="%(message)s")
for name, value in json.loads(args[1]).items():
    setattr(router, name, value)
store = TCPStore("127.0.0.1", 0, is_master=True)
say(store.port)
sys.stdin.readline()
store.close()
"""

_PAUSE_S = 0.002


@contextlib.contextmanager
def bystander(store: TCPStore) -> Iterator[None]:
    """Let a genuine client work while the server is attacked; each of its calls must succeed."""
    began, over = threading.Event(), threading.Event()

    def work() -> int:
        calls = 0
        while not over.wait(_PAUSE_S):
            assert store.add("bystander", 1) > 0
            calls += 1
            began.set()
        return calls

    with ThreadPoolExecutor(1) as pool:
        calls = pool.submit(work)
        calls.add_done_callback(lambda _: began.set())
        began.wait()
        try:
            yield
        finally:
            over.set()
        assert calls.result() > 0


@dataclass
class Victim:
    """The server: its process, port and key, and what it writes into its log."""

    program: Program
    port: int
    key: JobKey
    log: Path
    _read: int = 0

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    def client(self) -> TCPStore:
        timeout = timedelta(seconds=PATIENCE_S)
        return TCPStore("127.0.0.1", self.port, timeout=timeout, key=self.key)

    def lines_about(self, what: str) -> list[str]:
        """The log's lines with `what` in them, when there are some."""
        return until(
            lambda: [text for text in self.lines() if what in text],
            lambda: f"{what} in the log: {self.lines()[-5:]}",
        )

    def refused(self, count: int) -> str:
        """Wait until so many were refused since this was asked last; return the lines about it.

        Who left at once has no name in them.
        """

        def found() -> int:
            more = [re.search(r" and (\d+) more: ", text) for text in self.lines()[self._read :]]
            return sum(1 + int(each[1] if each else 0) for each in more)

        until(lambda: found() >= count, lambda: f"{count} refusals: {self.lines()[self._read :]}")
        assert found() == count
        lines = self.lines()[self._read :]
        self._read += len(lines)
        return "\n".join(lines)

    @contextlib.contextmanager
    def under_attack(self) -> Iterator[None]:
        """Attack inside: a genuine client works meanwhile, and a newcomer gets in afterwards."""
        store = self.client()
        with bystander(store):
            yield
        store.close()
        newcomer = self.client()
        newcomer.set("after", "the attack")
        newcomer.close()


@contextlib.contextmanager
def victim(folder: Path, settings: dict[str, float]) -> Iterator[Victim]:
    """A server with its own key; `settings` changes numbers of `router`."""
    key = mint()
    path = key_file(folder / "key", key.raw)
    log = folder / "log"
    log.touch()
    code = "import json\n" + SERVER
    with running((code, str(log), json.dumps(settings)), DURE_JOB_KEY_FILE=path) as (program,):
        yield Victim(program, int(line(program)), key, log)
        assert program.poll() is None, "the server has ended"
