"""Who must not see a page: other hosts, other users, other pages of the same browser."""

import stat
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from dure.viewer.access import HEADERS
from tests.launch.procs.launching import Launching
from tests.trace.made_up import record, write
from tests.viewer.procs.pages import ADDRESS, Served, viewing
from tests.waiting import until

_NOBODY = 65534
_SECRET = "a line that only its user may read"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("traces")
    write(folder, 0, [record(0, 1)], {"reason": _SECRET})
    with viewing(folder) as page:
        yield page


@pytest.fixture(scope="module")
def entered(served: Served) -> tuple[str, str]:
    """The path and the cookie of who has used the address first."""
    return served.enter()


def test_who_has_the_cookie_sees_the_page_and_other_pages_of_the_browser_do_not(
    served: Served, entered: tuple[str, str]
) -> None:
    """One way to be refused; `tests/viewer/test_access.py` has them all."""
    path, cookie = entered
    assert "<main>" in served.ask(path, headers={"Cookie": cookie}).text
    assert _SECRET in served.ask(f"{path}events", headers={"Cookie": cookie}).text
    for where in (path, f"{path}events", f"{path}output?rank=0"):
        answer = served.ask(where, headers={"Cookie": cookie, "Origin": "http://evil.example"})
        assert answer.status == 403
        assert _SECRET not in answer.text and "<main>" not in answer.text
    assert _SECRET not in served.ask("/").text


def test_every_answer_tells_the_browser_to_trust_nothing(
    served: Served, entered: tuple[str, str]
) -> None:
    path, cookie = entered
    for answer in (
        served.ask("/"),
        served.ask("/nowhere"),
        served.ask("/", headers={"Host": "evil.example"}),
        served.ask("/static/page.js"),
        served.ask(path, headers={"Cookie": cookie}),
        served.ask(f"{path}events", headers={"Cookie": cookie}),
    ):
        assert HEADERS.items() <= {k: answer.headers[k.lower()] for k in HEADERS}.items()
    assert HEADERS["Referrer-Policy"] == "no-referrer"
    assert "default-src 'none'" in HEADERS["Content-Security-Policy"]


def test_other_addresses_of_this_host_do_not_answer(served: Served) -> None:
    listening = [
        c.laddr.ip
        for c in psutil.Process(served.process.pid).net_connections("inet")
        if c.status == psutil.CONN_LISTEN
    ]
    assert listening == ["127.0.0.1"]


_LOOK = """
import encodings.idna, http.client, os, pathlib  # what is imported now can be used then
os.setgroups([]); os.setgid({nobody}); os.setuid({nobody})

def ask(path):
    line = http.client.HTTPConnection("127.0.0.1", {port})
    line.request("GET", path)
    return line.getresponse()

def told(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""

seen = [ask(path).read() for path in ("/", "/events", "/output?rank=0", "/session")]
assert not any(b"{secret}" in text for text in seen), seen
for process in pathlib.Path("/proc").glob("[0-9]*"):
    for name in ("cmdline", "environ"):
        assert b"{token}" not in told(process / name), process
print("nothing", ask("/events").status)
"""


@pytest.mark.needs("root")
def test_another_local_user_sees_nothing_of_a_run(job: Launching) -> None:
    secret = "only for me"
    program = job.write(f"""
        import time, sys
        print({secret!r}, flush=True)
        sys.stdin.read()
    """)
    run = job.start("-n", "1", "--page", "--no-zygote", program, stdin=subprocess.PIPE)
    assert run.stderr is not None and run.stdout is not None
    match = ADDRESS.search(run.stderr.readline())
    assert match is not None
    assert secret in run.stdout.readline()
    code = _LOOK.format(nobody=_NOBODY, port=match["port"], token=match["token"], secret=secret)
    other = subprocess.run(
        [sys.executable, "-"], input=code, capture_output=True, text=True, check=False
    )
    assert other.stdout == "nothing 403\n", other.stderr
    (folder,) = job.directory.glob("dure_page_*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    served = Served(int(match["port"]), match["token"], run)
    path, cookie = served.enter()
    output, headers = f"{path}output?rank=0", {"Cookie": cookie}
    until(lambda: secret in served.ask(output, headers=headers).text, "the line on the page")
    assert job.finish(run, "").code == 0
