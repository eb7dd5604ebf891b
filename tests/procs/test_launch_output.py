"""Output torture: many lines, long lines, garbage, unfinished lines, slow readers."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from dure.launch import JobSpec, Line, run_job
from procs.launching import DURE, Launching, unfolded
from procs.launching import launching as _launching


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Launching]:
    yield from _launching(tmp_path)


def test_ten_thousand_lines_of_each_rank_arrive_whole_and_in_order(job: Launching) -> None:
    program = job.write("""
        import os, sys
        for i in range(10_000):
            print("line", i, os.environ["RANK"] * (i % 100))
            if i % 10 == 0:
                print("error", i, file=sys.stderr)
    """)
    done = job.run("-n", "2", program)
    assert done.code == 0
    for rank in (0, 1):
        assert done.lines(rank) == [f"line {i} {str(rank) * (i % 100)}" for i in range(10_000)]
        errors = [line for line in unfolded(done.err, rank) if line.startswith("error")]
        assert errors == [f"error {i}" for i in range(0, 10_000, 10)]


def test_long_lines_and_garbage_survive(job: Launching) -> None:
    program = job.write("""
        import os, random, sys
        rank = int(os.environ["RANK"])
        random.seed(rank)
        for _ in range(5):
            text = random.randbytes(300_000).replace(b"\\n", b"\\r")
            sys.stdout.buffer.write(text + b"\\n")
            sys.stdout.flush()
    """)
    out = subprocess.run(
        [*DURE, "run", "-n", "2", program], stdout=subprocess.PIPE, timeout=30, check=False
    )
    assert out.returncode == 0
    lines = out.stdout.split(b"\n")[:-1]
    assert len(lines) == 10
    expected: Counter[str] = Counter()
    import random

    for rank in (0, 1):
        random.seed(rank)
        for _ in range(5):
            text = random.randbytes(300_000).replace(b"\n", b"\r")
            expected[hashlib.sha256(b"[%d] " % rank + text).hexdigest()] += 1
    assert Counter(hashlib.sha256(line).hexdigest() for line in lines) == expected


def test_unfinished_line_is_shown_while_the_rank_waits(job: Launching) -> None:
    program = job.write("""
        import sys
        print("Name? ", end="", flush=True)
        print("hello", sys.stdin.readline().strip())
    """)
    process = job.start("-n", "1", program, stdin=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(len("[0] Name? ")) == "[0] Name? "
    done = job.finish(process, stdin="Dure\n")
    assert done.out == "hello Dure\n"


def test_missing_last_newline_is_added(job: Launching) -> None:
    program = job.write("import os; print('end', os.environ['RANK'], end='')")
    done = job.run("-n", "3", program)
    assert sorted(done.out.splitlines()) == ["[0] end 0", "[1] end 1", "[2] end 2"]


def test_prefix_is_padded_to_one_width(job: Launching) -> None:
    done = job.run("-n", "11", "--no-python", "sh", "-c", "echo x $RANK")
    assert sorted(done.out.splitlines()) == sorted(f"[{rank:>2}] x {rank}" for rank in range(11))


def test_line_that_all_ranks_write_is_shown_once(job: Launching) -> None:
    program = job.write("""
        import os, sys
        print("hello")
        print("same", file=sys.stderr)
        print("mine", os.environ["RANK"])
        sys.stdin.read()
    """)
    done = job.run("-n", "3", program)
    assert sorted(done.out.splitlines()) == [
        "[0-2] hello",
        "[0] mine 0",
        "[1] mine 1",
        "[2] mine 2",
    ]
    assert "[0-2] same" in done.err.splitlines()


def test_slow_reader_slows_the_ranks_and_loses_nothing(job: Launching) -> None:
    program = job.write("for i in range(100_000): print(i, 'x' * 80)")
    process = job.start("-n", "1", program)
    assert process.stdout is not None
    assert process.stdout.readline() == f"[0] 0 {'x' * 80}\n"
    status = Path(f"/proc/{process.pid}/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    assert int(resident.split()[1]) < 200_000  # KiB: the launcher does not hoard
    lines = list(process.stdout)
    assert len(lines) == 99_999
    assert lines[-1].startswith("[0] 99999 ")
    assert job.finish(process).code == 0


def test_on_line_gets_every_line_instead_of_the_terminal(
    job: Launching, capfd: pytest.CaptureFixture[str]
) -> None:
    program = job.write("""
        import sys
        print("out"); print("err", file=sys.stderr); print("last", end="")
    """)
    lines: list[Line] = []
    run_job(JobSpec(program=program, nproc=2, on_line=lines.append, quiet=True))
    assert sorted((line.rank, line.stream, line.text) for line in lines) == [
        (0, "stderr", b"err"),
        (0, "stdout", b"last"),
        (0, "stdout", b"out"),
        (1, "stderr", b"err"),
        (1, "stdout", b"last"),
        (1, "stdout", b"out"),
    ]
    assert capfd.readouterr() == ("", "")


def test_terminal_gets_colours_and_a_prefix_after_carriage_returns(job: Launching) -> None:
    program = job.write("""
        import sys
        sys.stdout.write("10%\\r20%\\r\\n")
    """)
    terminal, inner = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "dure.cli", "run", program],
        stdin=subprocess.DEVNULL,
        stdout=inner,
        stderr=subprocess.DEVNULL,
    )
    os.close(inner)
    data = b""
    while b"\n" not in data:
        data += os.read(terminal, 1000)
    assert process.wait(timeout=30) == 0
    os.close(terminal)
    prefix = b"\x1b[36m[0] \x1b[0m"
    assert data.startswith(prefix + b"10%\r" + prefix + b"20%\r")
