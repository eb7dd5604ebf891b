"""Core dumps hold no keys: those of a job's processes are searched, real ones and simulated ones.

The programs also hold a secret of their own, in plain memory: a search that does not find that one
proves nothing.
"""

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from dure.store import JobKey
from dure.store.key import mint
from procs.store_programs import line, running
from security.dumps import dump_of, kept_in_files
from security.forms import found_in_dump

pytestmark = pytest.mark.timeout(180)  # all of a process's memory is read, several times

# Each rank talks to the launcher's store, and to one of rank 0's own, through many connections.
PROGRAM = """
import os, signal, sys
from pathlib import Path
from dure.store import TCPStore
loot, here = Path(sys.argv[1]).read_bytes(), Path(sys.argv[2])
host, port = os.environ["DURE_STORE_ADDR"].rsplit(":", 1)
rank, turn = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
job = TCPStore(host, int(port))
own = [TCPStore("127.0.0.1", 0, is_master=True)] if rank == 0 else []
job.set("own port " + turn, str(own[0].port)) if own else None
own += [TCPStore("127.0.0.1", int(job.get("own port " + turn))) for _ in range(3)]
for store in own:
    store.add("there", 1)
(here / f"{turn}-{rank}.new").write_text(str(os.getpid()))
(here / f"{turn}-{rank}.new").rename(here / f"{turn}-{rank}")
while True:
    signal.pause()
"""

# A server and its clients, some of which come when the first one has been served.
LONELY = """
from pathlib import Path
import resource
from dure.store import hiding
resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)
loot = Path(args[0]).read_bytes()
if len(args) > 1:
    hiding._MOST_SEARCHED = int(args[1])
if len(args) > 2:
    hiding._MOST_OF_ARENAS = int(args[2])
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
server = TCPStore("127.0.0.1", 0, is_master=True)
while sys.stdin.readline():
    clients = [TCPStore("127.0.0.1", server.port) for _ in range(2)]
    say(len(clients))
"""


needs_dumps = pytest.mark.skipif(
    not kept_in_files() or resource.getrlimit(resource.RLIMIT_CORE)[1] == 0,
    reason="the kernel hands dumps to another program, or the hard limit forbids them",
)

needs_some_dump = pytest.mark.skipif(
    kept_in_files() and resource.getrlimit(resource.RLIMIT_CORE)[1] == 0,
    reason="the hard limit forbids dumps, so nothing is searched for",
)


@dataclass
class Job:
    """A job of two ranks with a key that the test knows, and dumps allowed."""

    process: subprocess.Popen[bytes]
    folder: Path
    key: JobKey
    loot: bytes

    def ranks(self, turn: int) -> list[int]:
        """The process numbers of the ranks of a round, once all its connections are there."""
        deadline = time.monotonic() + 50
        files = [self.folder / "here" / f"{turn}-{rank}" for rank in range(2)]
        while not all(file.exists() for file in files):
            assert self.process.poll() is None, "the job has ended"
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return [int(file.read_text()) for file in files]

    def shows_only_loot(self, pid: int) -> None:
        shows_only_loot(pid, self.loot, self.key)

    def cores(self) -> list[Path]:
        return list(self.folder.glob("core*"))


def shows_only_loot(pid: int, loot: bytes, key: JobKey) -> None:
    """A dump holds no key, soon after the last connection was made."""
    deadline = time.monotonic() + 20
    while found := found_in_dump(dump := dump_of(pid), key):
        assert time.monotonic() < deadline, found
    assert loot in dump


def key_in(path: Path) -> JobKey:
    key = mint()
    path.touch(0o600)
    path.write_bytes(key.raw)
    return key


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    with tempfile.TemporaryDirectory(prefix="dure-test-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # so that others see what of it is shut
        yield from started_in(folder)


def started_in(folder: Path) -> Iterator[Job]:
    (folder / "here").mkdir()
    (folder / "program.py").write_text(PROGRAM)
    loot = os.urandom(32)
    (folder / "loot").write_bytes(loot)
    key = key_in(folder / "key")
    process = subprocess.Popen(
        [
            *("sh", "-c", 'ulimit -c "$(ulimit -H -c)"; exec "$@"', "sh"),
            *(sys.executable, "-m", "dure.cli", "run", "--nproc", "2", "--preload", "json"),
            *("--max-restarts", "1", "--key-file", "key", "--log-dir", "logs"),
            *("program.py", "loot", "here"),
        ],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    yield Job(process, folder, key, loot)
    process.terminate()
    process.wait(30)


def opened_as(user: int, paths: list[str]) -> list[str]:
    """Return which of `paths` another user can open."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            for path in paths:
                try:
                    os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
                except OSError:
                    continue
                os.write(write, path.encode() + b"\0")
            os.write(write, b"all")
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as told:
        *opened, last = told.read().decode().split("\0")
    os.waitpid(child, 0)
    assert last == "all"
    return opened


def test_another_user_can_look_into_nothing_of_a_job(job: Job) -> None:
    """Only what the kernel tells everybody of every process: not memory, variables, descriptors."""
    if os.getuid():
        pytest.skip("only root can become another user")
    job.ranks(0)
    launcher = psutil.Process(job.process.pid)
    secret: list[str] = []
    for process in (launcher, *launcher.children(recursive=True)):
        folder = Path(f"/proc/{process.pid}")
        secret += [str(folder / name) for name in ("mem", "environ", "maps", "auxv", "fd", "cwd/")]
        secret += [f"{folder}/fd/{number}" for number in os.listdir(folder / "fd")]
    logs = job.folder / "logs"
    kept = [str(path) for path in (job.folder / "key", logs, *logs.rglob("*"))]
    assert len(secret) > 50
    assert len(kept) > 2
    public = [str(job.folder), f"/proc/{job.process.pid}/cmdline"]
    assert opened_as(65534, [*public, *secret, *kept]) == public


def test_no_process_of_a_job_would_dump_its_key(job: Job) -> None:
    ranks = job.ranks(0)
    helpers = [
        child.pid for child in psutil.Process(job.process.pid).children() if child.pid not in ranks
    ]
    assert len(helpers) == 2  # the guardian and the zygote
    for pid in ranks:
        job.shows_only_loot(pid)
    for pid in helpers:
        assert not found_in_dump(dump_of(pid), job.key)


@needs_dumps
def test_real_dumps_of_a_crashed_job_hold_no_key(job: Job) -> None:  # which ends the job
    first = job.ranks(0)[0]
    job.shows_only_loot(first)
    os.kill(first, signal.SIGSEGV)
    job.ranks(1)
    (core,) = job.cores()
    dump = core.read_bytes()
    assert job.loot in dump
    assert not found_in_dump(dump, job.key)
    core.unlink()
    job.process.send_signal(signal.SIGABRT)
    assert job.process.wait(30) == -signal.SIGABRT
    assert not job.cores()  # the launcher, which holds all keys, leaves no dump at all


@needs_some_dump
@pytest.mark.parametrize("variables", [{}, {"MALLOC_ARENA_MAX": "1"}], ids=["arenas", "one heap"])
def test_a_server_hides_what_each_connection_brings(
    variables: dict[str, str], tmp_path: Path
) -> None:
    loot = os.urandom(32)
    (tmp_path / "loot").write_bytes(loot)
    key = key_in(tmp_path / "key")
    file = str(tmp_path / "key")
    with running((LONELY, str(tmp_path / "loot")), DURE_JOB_KEY_FILE=file, **variables) as programs:
        (program,) = programs
        assert program.stdin is not None
        for _ in range(2):
            program.stdin.write("more\n")
            program.stdin.flush()
            assert line(program) == "2"
        shows_only_loot(program.pid, loot, key)


@needs_some_dump
def test_what_is_too_much_to_search_is_left_out_of_dumps(tmp_path: Path) -> None:
    loot = os.urandom(32)
    (tmp_path / "loot").write_bytes(loot)
    key = key_in(tmp_path / "key")
    variables = {"DURE_JOB_KEY_FILE": str(tmp_path / "key"), "MALLOC_ARENA_MAX": "1"}
    with running((LONELY, str(tmp_path / "loot"), "0"), **variables) as programs:
        (program,) = programs
        assert program.stdin is not None
        program.stdin.write("more\n")
        program.stdin.flush()
        assert line(program) == "2"
        deadline = time.monotonic() + 20
        while (found := found_in_dump(dump := dump_of(program.pid), key)) or loot in dump:
            assert time.monotonic() < deadline, found


@needs_some_dump
def test_arenas_that_are_too_much_to_search_are_left_out_of_dumps(tmp_path: Path) -> None:
    """Also while dumps are off, since a program may switch them on."""
    loot = os.urandom(32)
    (tmp_path / "loot").write_bytes(loot)
    key = key_in(tmp_path / "key")
    program = (LONELY, str(tmp_path / "loot"), "0", "0")
    with running(program, DURE_JOB_KEY_FILE=str(tmp_path / "key")) as (started,):
        assert started.stdin is not None
        started.stdin.write("more\n")
        started.stdin.flush()
        assert line(started) == "2"
        shows_only_loot(started.pid, loot, key)
