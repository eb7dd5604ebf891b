"""Training with a meter around it, for tests."""

from __future__ import annotations

import torch
from torch import nn

import dure as dist

STEPS, SAMPLES = 4, 3


class Training:
    """A small DDP model, its optimizer and a meter around both."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 300), nn.ReLU(), nn.Linear(300, 8))
        self.ddp = dist.DistributedDataParallel(net, bucket_cap_mb=0.005)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1)
        self.meter = dist.StepMeter(self.ddp, self.optimizer)

    @property
    def bucket_bytes(self) -> list[int]:
        """Sizes of the buckets, the bitmap of used parameters included."""
        return [bucket.num_bytes for bucket in self.ddp.reducer.buckets]

    def run(self, accumulate: int = 1, board: dist.TensorBoardWriter | None = None) -> None:
        batches = torch.ones(STEPS * accumulate, SAMPLES, 8)
        for number, x in enumerate(self.meter.batches(batches), 1):
            if number % accumulate:
                with self.ddp.no_sync():
                    self.ddp(x).sum().backward()
                continue
            self.ddp(x).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if board is not None:
                board.write(loss=float(number))
