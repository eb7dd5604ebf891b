"""A program written for torch.distributed runs under torchrun with one line changed, its import."""

from __future__ import annotations

import re
import sys

from tests.launch.procs.launching import Launching

FOR_TORCH = """
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
group = dist.new_group(list(range(size)))
tensor = torch.ones(1)
dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
assert tensor.item() == size
model = nn.Linear(3, 2)
dist.broadcast(model.weight.data, 0)
model(torch.full((4, 3), float(rank))).sum().backward()
dist.all_reduce(model.weight.grad)
assert torch.equal(model.weight.grad, torch.full((2, 3), 4.0 * sum(range(size))))
dist.destroy_process_group()
print(f"rank {rank} of {size}: done", flush=True)
"""


def test_a_program_runs_with_its_import_changed(job: Launching) -> None:
    ours = FOR_TORCH.replace("import torch.distributed as dist", "import dure as dist")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = job.finish(job.start_any(sys.executable, *torchrun, job.write(ours)))
    assert done.code == 0, done.err
    said = sorted(re.findall(r"rank \d of \d: done", done.out))  # lines of two ranks may mix
    assert said == ["rank 0 of 2: done", "rank 1 of 2: done"]
