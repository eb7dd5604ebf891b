"""What 2 and 4 ranks on one GPU get from each backend."""

from __future__ import annotations

import datetime

import torch

import dure as dist
from gpu.checks import DEVICE, Refused, check, outcome, told

BACKENDS = (None, "shm", "hybrid", "gloo", "nccl")
SPELLINGS = (*BACKENDS, "cpu:shm,cuda:nccl", "cpu:gloo,cuda:nccl", "cuda:shm", "cuda:gloo")


def _one_of_several(backend: str | None, device: str) -> tuple[str, str]:
    try:
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=15))
        t = torch.full((3,), dist.get_rank() + 1.0, device=device)
        dist.all_reduce(t)
        size = dist.get_world_size()
        assert t.tolist() == [size * (size + 1) / 2] * 3, t
        said = str(dist.get_backend_config())
        dist.destroy_process_group()
        return "ok", said
    except Exception as error:
        return outcome(error, may_refuse=True), told(error)


def several(count: int, backend: str | None) -> None:
    """Add the check of some ranks that use one GPU over one backend."""

    def run() -> str:
        results = dist.spawn(_one_of_several, count, (backend, str(DEVICE)))
        worst = max(results, key=lambda r: ("ok", "refused", "FAILED").index(r[0]))
        if worst[0] != "ok":
            raise (Refused if worst[0] == "refused" else AssertionError)(worst[1])
        return worst[1]

    check("shared", f"{count} ranks, {backend or 'no backend named'}", may_refuse=True)(run)


for _count in (2, 4):
    for _spelling in SPELLINGS:
        several(_count, _spelling)
