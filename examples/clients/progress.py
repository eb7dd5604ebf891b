"""What shows progress, in ranks of `dure run`: tqdm, rich and TensorBoard.

dure run --stand-in-gloo --nproc 2 examples/clients/progress.py
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from rich.progress import track
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "gloo")
rank = dist.get_rank()
folder = Path(tempfile.mkdtemp())
writer = SummaryWriter(str(folder)) if rank == 0 else None
total = torch.zeros(())
for step in tqdm(range(20), desc=f"rank {rank}"):  # a bar of each rank
    value = torch.tensor(float(step + rank))
    dist.all_reduce(value)
    total += value
    if writer:
        writer.add_scalar("value", value, step)
for _ in track(range(5), description="rich", disable=rank != 0):
    dist.barrier()
if writer:
    writer.close()
    assert list(folder.glob("events.out.tfevents.*"))
    print("total", total.item())
dist.destroy_process_group()
