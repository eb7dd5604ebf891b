"""What another user of the host can open of a job: nothing."""

import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.launch.procs.launching import Launching
from tests.waiting import key_file, until

PROGRAM = """
import os, signal, sys
print("here", flush=True)
open(os.path.join("here", os.environ["RANK"]), "w").close()
signal.pause()
"""


OPENER = """
import os, sys
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
for path in sys.stdin.read().split("\\0"):
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except OSError:
        continue
    print(path)
print("all")
"""


def opened_by_nobody(paths: list[str]) -> list[str]:
    """Return which of `paths` another user can open."""
    words = [sys.executable, "-c", OPENER]
    done = subprocess.run(words, input="\0".join(paths), capture_output=True, text=True, check=True)
    *opened, last = done.stdout.splitlines()
    assert last == "all"
    return opened


def living_family(pid: int) -> list[int]:
    """Return a process and those below it, but for zombies, which anybody may open."""
    found: list[int] = []
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


@pytest.mark.needs("root")
def test_another_user_can_look_into_nothing_of_a_job() -> None:
    """Only what the kernel tells everybody of every process: not memory, variables, descriptors."""
    with tempfile.TemporaryDirectory(prefix="dure-test-") as name:
        folder, jobs = Path(name), Launching(Path(name))
        folder.chmod(0o755)  # so that others see what of it is shut
        (folder / "here").mkdir()
        key, logs = key_file(folder / "key"), folder / "logs"
        words = ["--nproc", "2", "--preload", "json", "--key-file", key, "--log-dir", logs]
        job = jobs.start(*words, jobs.write(PROGRAM))
        try:
            until(lambda: len(os.listdir(folder / "here")) == 2, "the ranks")
            kept = [str(path) for path in (key, logs, *logs.rglob("*"))]
            assert len(kept) > 2
            public = [str(folder), f"/proc/{job.pid}/cmdline"]

            def opened() -> list[str]:
                """Return what could be opened; nothing if a process ended meanwhile."""
                family, secret = living_family(job.pid), list[str]()
                with suppress(FileNotFoundError):
                    for pid in family:
                        at = Path(f"/proc/{pid}")
                        kinds = ("mem", "environ", "maps", "auxv", "fd")
                        secret += [str(at / each) for each in kinds]
                        secret += [f"{at}/cwd/", *(f"{at}/fd/{n}" for n in os.listdir(at / "fd"))]
                found = opened_by_nobody([*public, *secret, *kept])
                return found if len(secret) > 50 and family == living_family(job.pid) else []

            assert until(opened, "the end of helpers") == public
        finally:
            jobs.kill()
