"""`dure plan`, called once for each command line."""

import contextlib
import json
import os
from functools import cache
from io import StringIO
from typing import Any
from unittest import mock

from dure.cli.app import run_command_line

LLAMA = ["--model", "llama3-8b", "--gpu", "h100"]


@cache
def called(*words: str, columns: int = 100) -> tuple[int, str, str]:
    """Run `dure plan WORDS` once on a terminal; return its code and output."""
    out, err = StringIO(), StringIO()
    with (
        mock.patch.dict(os.environ, COLUMNS=str(columns)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = run_command_line(["plan", *words])
    return code, out.getvalue(), err.getvalue()


def answered(*words: str) -> Any:
    code, out, err = called(*words, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)
