"""Awkward programs: each behaves under `dure run` as it does under plain Python."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from procs.launching import Launching
from procs.launching import launching as _launching

PROGRAMS = {
    "argparse": """
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--lr", type=float)
        print(parser.parse_args(["--lr", "3"]), parser.prog)
    """,
    "argparse_error": """
        import argparse
        argparse.ArgumentParser().parse_args(["--what"])
    """,
    "atexit": """
        import atexit
        class Thing: pass
        @atexit.register
        def last():
            import pickle
            print("last", type(pickle.loads(pickle.dumps(Thing()))).__name__)
        print("first")
    """,
    "multiprocessing_spawn": """
        import multiprocessing
        def square(x):
            return x * x
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(2) as pool:
                print(pool.map(square, range(4)))
    """,
    "multiprocessing_fork": """
        import multiprocessing
        def square(x):
            return x * x
        if __name__ == "__main__":
            with multiprocessing.get_context("fork").Pool(2) as pool:
                print(pool.map(square, range(4)))
    """,
    "fork_that_raises": """
        import os
        if os.fork() == 0:
            raise ValueError("only the child")
        _, status = os.wait()
        print(os.waitstatus_to_exitcode(status))
    """,
    "thread_outlives_main": """
        import threading, time
        def late():
            time.sleep(0.1)
            print("late", __name__)
        threading.Thread(target=late).start()
    """,
    "exec": """
        import os, sys
        os.execv(sys.executable, [sys.executable, "-c", "print('another')"])
    """,
    "source_of_itself": """
        import inspect, sys
        def f():
            return 1
        print(inspect.getsource(f), sys.modules["__main__"].__dict__ is globals())
    """,
    "own_excepthook": """
        import sys
        sys.excepthook = lambda kind, error, trace: print("hook", kind.__name__, trace.tb_lineno)
        raise ValueError
    """,
    "syntax_error": "def f(:\n    pass\n",
    "exception_group": """
        raise ExceptionGroup("several", [ValueError("a"), KeyError("b")])
    """,
    "message_that_fails": """
        class Bad(Exception):
            def __str__(self):
                raise ValueError
        raise Bad
    """,
    "sigterm_handler": """
        import os, signal, sys
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
        os.kill(os.getpid(), signal.SIGTERM)
    """,
    "signals_and_flags": """
        import signal, sys
        print(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), sys.flags)
    """,
    "annotations": """
        x: int = 3
        print(__annotations__, sorted(globals()))
    """,
    "future_import_does_not_leak_in": """
        def f(x: print("evaluated")): ...
    """,
    "relative_file": """
        from pathlib import Path
        import beside
        print(beside.NAME, Path(__file__).name)
    """,
    "dataclass_and_pickle": """
        import dataclasses, pickle
        @dataclasses.dataclass
        class Point:
            x: int
        print(pickle.loads(pickle.dumps(Point(3))))
    """,
}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Launching]:
    yield from _launching(tmp_path)


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_behaves_as_under_plain_python(job: Launching, name: str) -> None:
    job.write("NAME = 'beside'", "beside.py")
    program = job.write(PROGRAMS[name])
    plain = subprocess.run(
        [sys.executable, program],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    done = job.run(program)
    assert done.lines(0) == plain.stdout.splitlines()
    assert done.code == plain.returncode
    told = [x.removeprefix("[0] ") for x in done.err.splitlines() if x.startswith("[0] ")]
    assert told == plain.stderr.splitlines()


def test_module_with_missing_import_shows_its_own_error(job: Launching) -> None:
    job.write("", "pkg/__init__.py")
    job.write("import no_such_module_at_all", "pkg/tool.py")
    done = job.run("-m", "pkg.tool")
    assert done.code == 1
    assert "no_such_module_at_all" in done.err


def test_directory_with_main_runs(job: Launching) -> None:
    job.write("import beside; print(beside.NAME)", "app/__main__.py")
    job.write("NAME = 'beside'", "app/beside.py")
    assert job.run("app").lines(0) == ["beside"]
