"""Output of real ranks: long lines, garbage, slow readers, terminals."""

import contextlib
import os
import termios

from tests.launch.procs.launching import Launching
from tests.waiting import until


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
    first, count = process.stdout.readline(), job.directory / "count"
    until(count.exists, "a rank that cannot write")
    written = int(count.read_text())
    assert written * len(first) < 8 << 20  # of 40 MB: the launcher does not hoard
    assert [first, *process.stdout.readlines()] == ["[0] " + "x" * 80 + "\n"] * written
    assert job.finish(process).code == 0


def on_terminal(job: Launching, *words: str) -> bytes:
    """Run `dure run` on a terminal of 100 columns, and return what it got."""
    terminal, inner = os.openpty()
    termios.tcsetwinsize(inner, (30, 100))
    process = job.start(*words, stdout=inner, stderr=inner)
    os.close(inner)
    data = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while more := os.read(terminal, 10_000):
            data += more
    os.close(terminal)
    assert job.finish(process).code == 0
    return data


def test_ranks_on_a_terminal_draw_side_by_side_and_know_its_width(job: Launching) -> None:
    program = job.write("""
        import os, sys
        rank = os.environ["RANK"]
        names = ("COLUMNS", "LINES", "FORCE_COLOR", "TTY_COMPATIBLE")
        print(*(os.environ.get(name) for name in names), sys.stdout.isatty())
        sys.stderr.write(f"\\r10% of {rank}")
        sys.stderr.write(f"\\r100% of {rank}\\n")
    """)
    data = on_terminal(job, "-n", "2", program)
    prefixes = [b"\x1b[36m[0] \x1b[0m", b"\x1b[33m[1] \x1b[0m"]
    assert b"96 30 1 1 False\r\n" in data
    for rank, prefix in enumerate(prefixes):
        assert prefix + b"100%% of %d\r\n" % rank in data


def test_only_rank_of_a_host_inherits_the_terminal_unless_its_output_is_asked_for(
    job: Launching,
) -> None:
    program = job.write("""
        import sys
        print(sys.stdout.isatty(), sys.stderr.isatty())
    """)
    assert on_terminal(job, program).startswith(b"True True\r\n")
    for flags in (["--timestamps"], ["--log-dir", "logs"], ["--prefix", "rank"]):
        assert b"[0] " in on_terminal(job, *flags, program), flags
