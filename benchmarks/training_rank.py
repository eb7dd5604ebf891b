"""One rank of benchmarks/training.py: it builds a model, joins its group, and times steps.

    python training_rank.py ADDRESS KIND LIBRARY MODEL

KIND is none (no communication), ddp, zero (DDP with ZeroRedundancyOptimizer), shared (zero with
host-shared parameters), or fsdp (`fully_shard` of each block and the model); LIBRARY is dure, gloo
(torch on gloo) or plugin (torch on the backend "dure"). Every rank has one thread, and the same
model and batch from the same seed.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any  # Any: modules and optimizers of two libraries

import torch
import torch.nn.functional as F
from compared.rank import serve
from torch import nn

import dure

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from gpt import GPT, Size, next_token_loss

GPTS = {
    "gpt10m": (Size(layers=6, heads=6, width=384, context=64), 4),
    "gpt50m": (Size(layers=10, heads=10, width=640, context=64), 2),
}
VOCABULARY = 256


def convnet() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """Two convolutions and two layers on images of 28 x 28, as in examples/07: 0.2 M parameters."""
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10)),
    )
    images, labels = torch.randn(64, 1, 28, 28), torch.randint(10, (64,))
    return model, lambda m: F.cross_entropy(m(images), labels)


def gpt(name: str) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """Return a GPT and its loss on a batch of random characters."""
    size, batch = GPTS[name]
    text = torch.randint(VOCABULARY, (batch, size.context + 1))
    return GPT(size, VOCABULARY), lambda m: next_token_loss(m(text[:, :-1]), text[:, 1:])


class Trainer:
    """A model and its optimizer; its methods are the controller's commands."""

    def __init__(self, kind: str, library: str, model: str) -> None:
        self.rank = int(os.environ["RANK"])
        self.label, self.version = f"{kind} {library}", torch.__version__
        torch.set_num_threads(1)
        torch.manual_seed(0)
        module, self._loss = convnet() if model == "convnet" else gpt(model)
        self._model, self._leave = module, lambda: None
        make: Any = torch.optim.SGD if model == "convnet" else torch.optim.AdamW
        if kind != "none":
            self._join(library)
        if kind == "fsdp":
            for part in (*getattr(module, "blocks", ()), module):
                self._find(library, "fully_shard")(part)
        elif kind != "none":
            self._model = self._find(library, "DistributedDataParallel")(module)
        if kind in {"zero", "shared"}:
            more = {"host_shared_parameters": True} if kind == "shared" else {}
            zero = self._find(library, "ZeroRedundancyOptimizer")
            self._optimizer = zero(module.parameters(), optimizer_class=make, lr=1e-4, **more)
        else:
            self._optimizer = make(module.parameters(), lr=1e-4)

    def _join(self, library: str) -> None:
        if library == "dure":
            dure.init_process_group()
            self._leave = dure.destroy_process_group
        else:
            torch.distributed.init_process_group("gloo" if library == "gloo" else "dure")
            self._leave = torch.distributed.destroy_process_group

    @staticmethod
    def _find(library: str, name: str) -> Any:
        if library == "dure":
            return getattr(dure.fsdp if name == "fully_shard" else dure, name)
        if name == "DistributedDataParallel":
            return nn.parallel.DistributedDataParallel
        # lazy: one rival needs it
        if name == "fully_shard":
            from torch.distributed.fsdp import fully_shard

            return fully_shard
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer

    def steps(self, count: int) -> dict[str, Any]:
        """Make `count` steps; return the seconds of each, and the last loss."""
        seconds: list[float] = []
        loss = torch.zeros(())
        for _ in range(count):
            began = time.perf_counter()
            loss = self._loss(self._model)
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            seconds.append(time.perf_counter() - began)
        return {"seconds": seconds, "loss": loss.item()}

    def memory(self) -> dict[str, int]:
        """Return this process, its largest size so far in bytes, and how many parameters it has."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "process": os.getpid(),
            "rss": peak,
            "parameters": sum(p.numel() for p in self._model.parameters()),
        }

    def leave(self) -> None:
        """End the group."""
        self._leave()


if __name__ == "__main__":
    trainer = Trainer(*sys.argv[2:])
    serve(sys.argv[1], trainer, trainer)
    trainer.leave()
