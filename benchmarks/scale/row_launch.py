"""Row 9: launchers of several hosts, and their leases, by `benchmarks/control_plane.py`.

A coordinator serves encrypted loopback connections of one agent for each host of 8 ranks. They
join, start a round, renew their leases for three seconds, and report the end at the same moment.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
control_plane = importlib.import_module("control_plane")

TITLE = "launchers and leases, hosts of 8 ranks"
RANKS = (32, 128, 512, 2048)
SECONDS = 3.0


def measure(ranks: int) -> dict[str, float]:
    """Run one job with agents of `ranks / 8` hosts."""
    control_plane.raise_descriptors()
    found = control_plane.measure(ranks // control_plane.NPROC, SECONDS)
    return {
        "requests per host": found["requests"],
        "bytes per host": found["bytes"],
        "s until all hosts have started": found["started_s"],
        "s until the end is settled": found["settled_s"],
        "s, longest renewal": found["renewal_s"],
    }
