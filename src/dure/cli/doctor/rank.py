"""What a rank of `dure doctor` does: a small collective over each backend, and a line about it.

    python -m dure.cli.doctor.rank LIMIT_S BACKEND...

Rank 0 prints one line about torch and its GPUs, and one per backend, `DURE-DOCTOR {...}`. A backend
that hangs ends by its group's timeout; if not, the doctor ends the ranks, and the missing lines
show which backend it was.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any  # Any: values of JSON

import torch

import dure as dist
from dure import env
from dure.cli.doctor.checks import MARK

_ROUNDS = 50
_COUNT = 1024


def main() -> None:
    limit_s, backends = float(sys.argv[1]), sys.argv[2:]
    count = torch.cuda.device_count()
    names = [torch.cuda.get_device_name(number) for number in range(count)]
    found = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": names}
    _print(found)
    for backend in backends:
        _print(_try(backend, limit_s))


def _print(line: dict[str, Any]) -> None:
    if env.integer("RANK", 0) == 0:
        os.write(1, f"{MARK}{json.dumps(line)}\n".encode())


def _try(backend: str, limit_s: float) -> dict[str, Any]:
    """Join, reduce a few numbers, check them and leave."""
    found: dict[str, Any] = {"backend": backend}
    try:
        with dist.process_group(backend, timeout=timedelta(seconds=limit_s)) as group:
            found["ranks"], found["us"] = group.size(), _reduce(backend, group)
            if group.copies is not None:
                found["copies"] = str(group.copies)
    except Exception as error:  # reported to the user
        found["error"] = f"{type(error).__name__}: {error}"
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


if __name__ == "__main__":
    main()
