"""Small programs that a test starts as processes of their own, and talks to line by line.

No program loads torch, so starting one costs a tenth of a second.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.waiting import PATIENCE_S

PRELUDE = """
import os, sys, time
from datetime import timedelta
from dure.errors import *
from dure.store import FileStore, JobKey, TCPStore
from dure.store.rendezvous import rendezvous
args = sys.argv[1:]
PATIENCE = timedelta(seconds=int(os.environ["DURE_TEST_TIMEOUT"]))
def say(*words): print(*words, flush=True)
"""

Program = subprocess.Popen[str]


@contextmanager
def running(*commands: tuple[str, ...], **environment: object) -> Iterator[list[Program]]:
    """Start (code, *arguments) programs; afterwards none of them is left."""
    variables = os.environ | {name: str(value) for name, value in environment.items()}
    programs: list[Program] = []
    try:
        for code, *arguments in commands:
            programs.append(
                subprocess.Popen(
                    [sys.executable, "-c", PRELUDE + code, *arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=variables,
                )
            )
        yield programs
    finally:
        for program in programs:
            program.kill()
            program.communicate()


def line(program: Program) -> str:
    """Return the next line the program says."""
    return program.stdout.readline().strip()


def output(program: Program) -> str:
    """Let the program end well and return what it said."""
    out, err = program.communicate(timeout=PATIENCE_S)
    assert program.returncode == 0, err
    return out.strip()
