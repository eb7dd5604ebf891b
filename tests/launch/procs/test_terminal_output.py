"""Output torture: many lines, long lines, garbage, unfinished lines, slow readers."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
from pathlib import Path

from tests.launch.procs.launching import DURE, Launching, unfolded, writers
from tests.waiting import PATIENCE_S, until


def test_many_lines_of_each_rank_arrive_whole_and_in_order(job: Launching) -> None:
    program = job.write("""
        import os, sys
        for i in range(3000):
            print("line", i, os.environ["RANK"] * (i % 100))
            if i % 10 == 0:
                print("error", i, file=sys.stderr)
    """)
    done = job.run("-n", "2", program)
    assert done.code == 0
    for rank in (0, 1):
        assert done.lines(rank) == [f"line {i} {str(rank) * (i % 100)}" for i in range(3000)]
        errors = [line for line in unfolded(done.err, rank) if line.startswith("error")]
        assert errors == [f"error {i}" for i in range(0, 3000, 10)]


def test_long_lines_and_garbage_survive(job: Launching) -> None:
    program = job.write("""
        import os, random, sys
        random.seed(int(os.environ["RANK"]))
        for _ in range(5):
            text = random.randbytes(300_000).replace(b"\\n", b"\\r")
            sys.stdout.buffer.write(text + b"\\n")
            sys.stdout.flush()
    """)
    job.finish(job.start("-n", "2", program, output=job.directory / "out"))
    shown = (job.directory / "out").read_bytes().split(b"\n")
    expected: list[bytes] = []
    for rank in (0, 1):
        made = random.Random(rank)
        texts = [made.randbytes(300_000).replace(b"\n", b"\r") for _ in range(5)]
        expected += [b"[%d] " % rank + text for text in texts]
    ranks = [line for line in shown if line and not line.startswith(b"[dure]")]
    assert sorted(map(hash, ranks)) == sorted(map(hash, expected))


def test_prefix_is_padded_and_a_missing_last_newline_added(job: Launching) -> None:
    done = job.run("--live", "-n", "11", "--no-python", "sh", "-c", "echo x $RANK; printf end$RANK")
    lines = [f"[{rank:>2}] {text}{rank}" for rank in range(11) for text in ("x ", "end")]
    assert sorted(done.out.splitlines()) == sorted(lines)  # without a terminal there is no view


def test_lines_that_all_ranks_write_are_shown_once(job: Launching) -> None:
    """The ranks write the same line until it was seen to fold, however late one of them starts."""
    program = job.write("""
        import os, time
        count = 0
        while not os.path.exists("seen"):
            print("alike")
            count += 1
            time.sleep(0.01)
        print(count, "lines of", os.environ["RANK"])
    """)
    process = job.start("-n", "2", program)
    assert process.stdout is not None
    shown: list[str] = []
    while not shown or writers(shown[-1]) != [0, 1]:
        shown.append(process.stdout.readline())
        assert shown[-1]
    (job.directory / "seen").touch()
    shown += process.stdout.readlines()
    assert job.finish(process).code == 0
    for rank in (0, 1):
        *alike, last = unfolded("".join(shown), rank)
        assert (set(alike), last) == ({"alike"}, f"{len(alike)} lines of {rank}")


def test_slow_reader_slows_the_ranks_and_loses_nothing(job: Launching) -> None:
    """The rank writes until nothing has been taken for a while, and then says how much was."""
    program = job.write("""
        import os, time
        from pathlib import Path
        os.set_blocking(1, False)
        line, count, refused = b"x" * 80 + b"\\n", 0, 0
        while refused < 50 and count < 500_000:
            try:
                os.write(1, line)  # all of it or nothing
                count, refused = count + 1, 0
            except BlockingIOError:
                time.sleep(0.01)
                refused += 1
        Path("part").write_text(str(count))
        os.rename("part", "count")
    """)
    process = job.start("-n", "1", program)
    assert process.stdout is not None
    first, count = process.stdout.readline(), job.directory / "count"
    until(count.exists, "a rank that cannot write")
    written = int(count.read_text())
    assert written * len(first) < 8 << 20  # of 40 MB: the launcher does not hoard
    assert [first, *process.stdout.readlines()] == ["[0] " + "x" * 80 + "\n"] * written
    assert job.finish(process).code == 0


def test_terminal_gets_colours_and_a_prefix_after_carriage_returns(job: Launching) -> None:
    program = job.write("""
        import sys
        sys.stdout.write("10%\\r20%\\r\\n")
    """)
    terminal, inner = os.openpty()
    process = job.start(program, stdout=inner)
    os.close(inner)
    data = b""
    while b"\n" not in data:
        data += os.read(terminal, 1000)
    assert job.finish(process).code == 0
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
    process = job.start(
        "--live", "-n", "2", program, stdin=subprocess.PIPE, stdout=inner, stderr=inner
    )
    os.close(inner)
    data = b""
    while data.count(b"3/9") < 2 or data.count(b"a line") < 1:
        data += os.read(terminal, 10_000)
    process.communicate(timeout=PATIENCE_S)
    with contextlib.suppress(OSError):  # the end of a terminal
        while more := os.read(terminal, 10_000):
            data += more
    os.close(terminal)
    assert process.returncode == 0
    assert data.endswith(b"\x1b[J")


def test_job_without_standard_output_and_errors_runs(job: Launching) -> None:
    program = job.write("""
        import os, pathlib, sys
        print("heard by nobody")
        print("nor this", file=sys.stderr)
        pathlib.Path(os.environ["RANK"]).touch()
    """)
    closed = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh"]
    command = [*closed, *DURE, "run", "-n", "2", "--log-dir", "logs", program]
    assert job.finish(job.start_any(*command)).code == 0
    assert {path.name for path in job.directory.iterdir()} == {"0", "1", "logs", "prog.py"}
    for stream, text in (("stdout", "heard by nobody"), ("stderr", "nor this")):
        log = Path(job.directory, f"logs/attempt_0/rank_1/{stream}.log")
        assert log.read_text().strip() == text
