"""Output torture: many lines, long lines, garbage, unfinished lines, slow readers."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
from pathlib import Path

from procs.launching import DURE, Launching, unfolded


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
        random.seed(int(os.environ["RANK"]))
        for _ in range(5):
            text = random.randbytes(300_000).replace(b"\\n", b"\\r")
            sys.stdout.buffer.write(text + b"\\n")
            sys.stdout.flush()
    """)
    words = [*DURE, "run", "-n", "2", program]
    shown = subprocess.check_output(words, timeout=100).split(b"\n")[:-1]
    expected: list[bytes] = []
    for rank in (0, 1):
        made = random.Random(rank)
        texts = [made.randbytes(300_000).replace(b"\n", b"\r") for _ in range(5)]
        expected += [b"[%d] " % rank + text for text in texts]
    assert sorted(map(hash, shown)) == sorted(map(hash, expected))


def test_prefix_is_padded_and_a_missing_last_newline_added(job: Launching) -> None:
    done = job.run("--live", "-n", "11", "--no-python", "sh", "-c", "echo x $RANK; printf end$RANK")
    lines = [f"[{rank:>2}] {text}{rank}" for rank in range(11) for text in ("x ", "end")]
    assert sorted(done.out.splitlines()) == sorted(lines)  # without a terminal there is no view


def test_lines_that_all_ranks_write_are_shown_once(job: Launching) -> None:
    program = job.write("""
        import os, sys, time
        for i in range(50):  # a busy machine may start a rank late: some lines fold at least
            print("step", i)
            time.sleep(0.01)
        print("mine", os.environ["RANK"])
    """)
    done = job.run("-n", "2", program)
    assert any(line.startswith("[0-1] step") for line in done.out.splitlines())
    for rank in (0, 1):
        assert done.lines(rank) == [f"step {i}" for i in range(50)] + [f"mine {rank}"]
    assert len(job.run("-n", "2", "--no-fold", program).out.splitlines()) == 102


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
    assert process.wait(timeout=100) == 0
    os.close(terminal)
    prefix = b"\x1b[36m[0] \x1b[0m"
    assert data.startswith(prefix + b"10%\r" + prefix + b"20%\r")


def test_live_view_shows_every_rank_and_its_step_and_goes_at_the_end(job: Launching) -> None:
    program = job.write("""
        import sys
        import dure
        dure.progress(3, 9, loss=0.5)
        print("a line")
        sys.stdin.read()
    """)
    terminal, inner = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "dure.cli", "run", "--live", "-n", "2", program],
        stdin=subprocess.PIPE,
        stdout=inner,
        stderr=inner,
    )
    os.close(inner)
    data = b""
    while data.count(b"3/9") < 2 or b"[0-1] " not in data:
        data += os.read(terminal, 10_000)
    process.communicate(timeout=100)
    with contextlib.suppress(OSError):  # the end of a terminal
        while more := os.read(terminal, 10_000):
            data += more
    os.close(terminal)
    assert process.returncode == 0
    assert data.endswith(b"\x1b[J")


def test_job_without_standard_output_and_errors_runs(job: Launching, tmp_path: Path) -> None:
    program = job.write("""
        import os, pathlib, sys
        print("heard by nobody")
        print("nor this", file=sys.stderr)
        pathlib.Path(os.environ["RANK"]).touch()
    """)
    closed = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh"]
    command = [*closed, *DURE, "run", "-n", "2", "--log-dir", "logs", program]
    assert subprocess.run(command, check=False, cwd=tmp_path, timeout=60).returncode == 0
    assert (tmp_path / "0").exists() and (tmp_path / "1").exists()
    for stream, text in (("stdout", "heard by nobody"), ("stderr", "nor this")):
        assert (tmp_path / f"logs/attempt_0/rank_1/{stream}.log").read_text().strip() == text
