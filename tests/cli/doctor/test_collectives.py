"""What `dure doctor` makes of the collectives it tried."""

from __future__ import annotations

from typing import Any

import pytest

from dure.cli.doctor import collectives
from dure.cli.doctor.checks import Level
from dure.cli.doctor.collectives import Attempt

OK, NOTE, WARNING, PROBLEM = Level.OK, Level.NOTE, Level.WARNING, Level.PROBLEM
WORKS = [{"backend": b, "ranks": 2, "us": 3.0} for b in ("shm", "gloo")]


@pytest.mark.parametrize(
    ("lines", "others", "levels"),
    [
        (WORKS, {}, [OK, OK]),
        ([{"backend": "shm", "absent": True}, WORKS[1]], {}, [PROBLEM, OK]),
        ([{"backend": "shm", "error": "CommTimeout: x"}, WORKS[1]], {}, [PROBLEM, OK]),
        (WORKS[:1], {"timed_out": True}, [OK, WARNING]),
        ([], {"code": 1, "words": "no memory"}, [PROBLEM]),
    ],
)
def test_collectives_say_which_backend_fails(
    lines: list[dict[str, Any]], others: dict[str, Any], levels: list[Level]
) -> None:
    attempt = Attempt(backends=("shm", "gloo"), lines=lines, **others)
    assert [finding.level for finding in collectives.judge(attempt)] == levels
