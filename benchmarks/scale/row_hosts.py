"""Row 5: a hybrid group over simulated hosts: connections, sub-communicators, and a death.

Real processes on one machine, two for each host: a process with a DURE_HOST_ID of its own counts as
on a host of its own. They make the group, exchange by a reduction and by messages, and then one of
them kills itself while the others wait in a reduction. The rest learns of it by the hosts' control
channels. Figures are of the rank with the largest value.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TITLE = "a hybrid group over hosts of 2 ranks"
RANKS = (8, 16, 32)
EACH = 2
PROGRAM = Path(__file__).with_name("hosts_rank.py")


def measure(ranks: int) -> dict[str, float]:
    """Run the job; return the largest figures of its ranks."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "dure.cli", "run", "--nproc", str(ranks), "--keep-going"]
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [*command, str(PROGRAM), folder, str(EACH)],
            env=variables,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=240,
            check=False,  # one rank is killed
        )
        files = sorted(Path(folder).glob("*.json"))
        found = [json.loads(file.read_text()) for file in files]
    if len(found) != ranks - 1:
        raise RuntimeError(f"{len(found)} of {ranks - 1} ranks learned of the death")
    return {name: max(each[name] for each in found) for name in found[0]}
