"""The reaper: ranks die at their agent's deadline, and not at one that is over."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import uuid

import pytest

from dure.launch.agent.membership import boottime
from dure.launch.ranks.reaper import Reaper


@pytest.mark.parametrize("extended", [False, True])
def test_ranks_die_at_the_deadline_unless_a_new_one_has_been_told_since(extended: bool) -> None:
    job = uuid.uuid4().hex
    rank = subprocess.Popen(["sleep", "60"], env=os.environ | {"DURE_LAUNCHER": job})
    try:
        with contextlib.closing(Reaper(job)) as reaper:
            reaper.extend(boottime() - 1)  # before it has even started
            if extended:
                reaper.extend(boottime() + 60)
                time.sleep(1)
                assert rank.poll() is None
            else:
                assert rank.wait(20) == -9
    finally:
        rank.kill()
        rank.wait()
