"""The reaper: ranks die at their agent's deadline, the last that it was told of."""

from __future__ import annotations

import contextlib
import os
import subprocess
import uuid

from dure.launch.agent.membership import boottime
from dure.launch.ranks.reaper import Reaper
from tests.waiting import PATIENCE_S

LATER_S = 0.5


def test_ranks_die_at_the_latest_deadline_and_not_before() -> None:
    job = uuid.uuid4().hex
    rank = subprocess.Popen(["sleep", "600"], env=os.environ | {"DURE_LAUNCHER": job})
    try:
        with contextlib.closing(Reaper(job)) as reaper:
            reaper.extend(boottime() - 1)  # before it has even started
            deadline = boottime() + LATER_S
            reaper.extend(deadline)
            assert rank.wait(PATIENCE_S) == -9
            assert boottime() >= deadline
    finally:
        rank.kill()
        rank.wait()
