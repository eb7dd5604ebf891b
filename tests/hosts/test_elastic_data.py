"""Elastic training over hosts: one host comes and one is lost; every sample is had exactly once."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

from tests.comm.namespace_hosts import Host, hosts
from tests.hosts.elastic_data import SAMPLES
from tests.launch.procs.launching import Launching
from tests.waiting import PATIENCE_S, key_file, until

pytestmark = [pytest.mark.slow, pytest.mark.needs("network namespaces", "engine")]

PORT = 29400


def test_each_sample_once_while_a_host_comes_and_one_is_lost(tmp_path: Path):
    jobs = Launching(tmp_path)
    key = key_file(tmp_path / "key")
    variables = {"DURE_JOB_KEY_FILE": str(key), "OMP_NUM_THREADS": "1", "DURE_SILENCE": "4"}
    variables["PYTHONPATH"] = str(Path(__file__).parents[2])
    outputs: list[Path] = []

    def start(host: Host, endpoint: str) -> subprocess.Popen[str]:
        outputs.append(tmp_path / f"{host.name}.txt")
        words = ["--nnodes", "1:3", "--nproc", "1", "--elastic", "--prefix", "none"]
        words += ["--rdzv-conf", "last_call_timeout=1", "--rdzv-endpoint", endpoint]
        words += ["-m", "tests.hosts.elastic_data", str(tmp_path)]
        with outputs[-1].open("w") as file:
            return jobs.start_on(host, *words, env=variables, output=file)

    def printed() -> str:
        return "\n".join(output.read_text() for output in outputs)

    def waits(step: int) -> None:
        until((tmp_path / f"waits {step}").exists, lambda: f"step {step}\n{printed()}")

    with hosts(3, "data") as made:
        a, b, c = made
        endpoint = f"{a.address}:{PORT}"
        first = start(a, endpoint)
        until(lambda: a.listens(PORT), printed)
        start(b, endpoint)
        waits(3)
        third = start(c, endpoint)
        waits(6)
        b.cut()
        b.kill()
        assert [first.wait(PATIENCE_S), third.wait(PATIENCE_S)] == [0, 0], printed()
        jobs.wait_until_gone()
        for output in (outputs[0], outputs[2]):
            lines = dict(line.split(" ", 1) for line in output.read_text().splitlines() if line)
            samples, sizes = (ast.literal_eval(lines[name]) for name in ("samples", "sizes"))
            assert sizes == [3 * [2] + 3 * [3] + 5 * [2], 13 * [2]]
            assert [sorted(epoch) for epoch in samples] == 2 * [list(range(SAMPLES))]
            assert samples[0] != samples[1], "in another order"
