"""Start and end of a rank's flight recorder, and of its handler for SIGUSR2.

Both start with the rank's first group and end with its last. The job has a name, so that the files
of its ranks are in one folder: that of the launcher, or one on which the ranks agree in the store.
"""

from __future__ import annotations

import os
import time

from dure import env
from dure.store.base import Store
from dure.trace import flight, line, publishing, signals, telemetry

_KEY = "trace/job"


def begin_recording(store: Store) -> None:
    """Name the job; listen to SIGUSR2 and the launcher, if it is the process's first group.

    Args:
        store: One that all ranks of the job share.

    Cost:
        At most one visit to the store.
    """
    if not flight.job():
        flight.set_job(env.text("DURE_LAUNCHER") or _agree(store))
    signals.install()
    line.answer_launcher()
    publishing.start()
    telemetry.start()


def _agree(store: Store) -> str:
    mine = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    return store.compare_set(_KEY, "", mine).decode()


def end_recording() -> None:
    """Forget the job and stop listening, if no group of the process is left."""
    if not flight.recording():
        flight.set_job("")
        signals.remove()
