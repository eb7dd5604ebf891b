"""Programs of accelerate and Lightning Fabric, started with `dure run`, over gloo and over Dure."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.needs("clients")]

ACCELERATE = """
    from accelerate import Accelerator

    if backend == "dure":  # a group that is there is taken; its name would be refused
        torch.distributed.init_process_group("dure")
    client = Accelerator(cpu=True)
    model, optimizer = client.prepare(model, optimizer)
    rank, gather = client.process_index, client.gather
"""
FABRIC = """
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    strategy = DDPStrategy(process_group_backend=backend)
    client = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    client.launch()
    model, optimizer = client.setup(model, optimizer)
    rank, gather = client.global_rank, client.all_gather
"""
PROGRAM = """
import sys
import torch
import dure.torch_backend

backend = sys.argv[1]
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.ones_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
%s
client.backward(model(torch.tensor([[rank + 1.0]])).sum())
optimizer.step()
ranks = gather(torch.tensor([rank])).flatten().tolist()
weight = next(model.parameters()).item()
used = torch.distributed.get_backend()
sys.stdout.write(f"rank {rank} of {ranks} over {used}: {weight:.6f}\\n")
"""


@pytest.mark.parametrize("backend", ["gloo", "dure"])
@pytest.mark.parametrize("client", [ACCELERATE, FABRIC], ids=["accelerate", "Fabric"])
def test_a_program_of_a_framework_trains_on_two_ranks(
    client: str, backend: str, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM % textwrap.dedent(client))
    done = subprocess.run(
        [sys.executable, "-m", "dure.run", "--nproc", "2", "--prefix", "none", program, backend],
        capture_output=True, text=True, check=False, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # The gradients are 1 and 2, so the weight becomes 1 - 0.1 * 1.5.
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))
    assert lines == [f"rank {rank} of [0, 1] over {backend}: 0.850000" for rank in (0, 1)]
