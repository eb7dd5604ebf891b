"""What a rank of `dure doctor` does: a small collective over each backend, and a line about it.

    python -m dure.cli.doctor.rank LIMIT_S BACKEND...

Rank 0 prints one line per backend, `DURE-DOCTOR {...}`, and one about torch and its GPUs. A backend
that hangs ends by its group's timeout; if not, the doctor ends the ranks, and the missing lines
show which backend it was.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any  # Any: what JSON holds

import torch

import dure as dist
from dure.comm.queries import engine_error

_ROUNDS = 50
_COUNT = 1024


def main() -> None:
    limit_s, backends = float(sys.argv[1]), sys.argv[2:]
    for number, backend in enumerate(backends):
        found = _try(backend, limit_s)
        if found.pop("rank", 0) == 0:
            for content in [_torch(), found] if number == 0 else [found]:
                os.write(1, f"DURE-DOCTOR {json.dumps(content)}\n".encode())


def _try(backend: str, limit_s: float) -> dict[str, Any]:
    """Join, reduce a few numbers, check them and leave."""
    found: dict[str, Any] = {"backend": backend}
    if not dist.is_backend_available(backend):
        reason = engine_error() if backend == "shm" else ""
        return found | {"absent": True, "reason": reason}
    try:
        with dist.process_group(backend, timeout=timedelta(seconds=limit_s)) as group:
            found["rank"], found["ranks"] = group.rank(), group.size()
            found["us"] = _reduce(backend, group)
            if group.copies is not None:
                found["copies"] = str(group.copies)
    except Exception as error:  # reported to the user
        return found | {"error": f"{type(error).__name__}: {error}"}
    return found


def _reduce(backend: str, group: dist.ProcessGroup) -> float:
    """Return the time of one all_reduce in microseconds, or raise if its numbers are wrong."""
    device = torch.device("cuda", group.rank()) if backend == "nccl" else torch.device("cpu")
    data = torch.empty(_COUNT, device=device)
    start = 0.0
    for number in range(_ROUNDS + 1):
        if number == 1:
            start = time.perf_counter()
        data.fill_(group.rank() + 1)
        group.all_reduce(data)
    seconds = time.perf_counter() - start
    wanted = group.size() * (group.size() + 1) / 2
    if not bool((data == wanted).all()):
        raise ArithmeticError(f"the sum is {data[0].item()}, not {wanted}")
    return seconds / _ROUNDS * 1e6


def _torch() -> dict[str, Any]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [torch.cuda.get_device_name(i) for i in range(count)]
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    apart = [(i, j) for i, j in pairs if not torch.cuda.can_device_access_peer(i, j)]
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": names, "apart": apart}


if __name__ == "__main__":
    main()
