"""What a host asks of the coordinator does not grow with the number of hosts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCALE = Path(__file__).parents[3] / "benchmarks" / "scale"


def _figures(ranks: int) -> dict[str, float]:
    """Join, start, renew and end a job of 8 ranks per host, by the row of benchmarks/scale."""
    command = [sys.executable, str(SCALE), "--measure", "9", str(ranks)]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=120, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_requests_and_bytes_of_a_host_are_those_of_8_hosts_among_256() -> None:
    few, many = _figures(8 * 8), _figures(256 * 8)
    # One request to join, and each waits for the start and the end; the rest are renewals, of which
    # a busy host sends fewer and another one more. A table of all hosts would be 30 times as long.
    assert few["requests per host"] >= 4
    assert many["requests per host"] <= 3 * few["requests per host"]
    assert few["bytes per host"] >= 1000
    assert many["bytes per host"] <= 3 * few["bytes per host"]
