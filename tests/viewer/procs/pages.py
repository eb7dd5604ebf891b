"""A page as tests use it: started on a folder of traces, asked by hand, or shown in Chromium."""

import contextlib
import http.client
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from tests.waiting import PATIENCE_S

ADDRESS = re.compile(r"http://127\.0\.0\.1:(?P<port>\d+)/#(?P<token>\S+)")


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    text: str


@dataclass
class Served:
    """A page that is served: its address, and requests to it that name any headers."""

    port: int
    token: str
    process: subprocess.Popen[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/#{self.token}"

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def ask(
        self,
        path: str,
        method: str = "GET",
        headers: dict[str, str] | None = None,
        body: str | None = None,
    ) -> Answer:
        """Send a request with these headers and a right Host, unless they have another."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in ({"Host": self.host} | (headers or {})).items():
                connection.putheader(name, value)
            data = None if body is None else body.encode()
            if data is not None:
                connection.putheader("Content-Length", str(len(data)))
            connection.endheaders(data)
            answer = connection.getresponse()
            stream = answer.headers.get("content-type", "").startswith("text/event-stream")
            text = answer.read1(1 << 16) if stream else answer.read()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, found, text.decode())

    def enter(self) -> tuple[str, str]:
        """Exchange the token; return the page's path, and the cookie as `name=value`."""
        origin = {"Origin": f"http://{self.host}"}
        answer = self.ask("/session", "POST", origin, self.token)
        assert answer.status == 200, answer.text
        return json.loads(answer.text)["path"], answer.headers["set-cookie"].partition(";")[0]


@contextlib.contextmanager
def viewing(*paths: Path) -> Iterator[Served]:
    """Serve `dure view PATHS`."""
    words = [sys.executable, "-m", "dure.cli", "view", *map(str, paths)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        line = process.stdout.readline()
        match = ADDRESS.search(line)
        assert match is not None, line + process.stdout.read()
        yield Served(int(match["port"]), match["token"], process)
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
        process.stdout.close()


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Start the system's Chromium."""
    path = shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
