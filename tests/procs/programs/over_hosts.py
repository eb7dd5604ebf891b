"""A rank of a job over several hosts: checks collectives, or waits to lose its peers.

Arguments: what to do, and a folder for reports. Prints "ready" when it is about to begin.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch

import dure as dist
from dure.errors import DureError


def check(rank: int, n: int) -> None:
    """Use every kind of operation once, small and large."""
    total = float(n * (n - 1) // 2)
    for count in (1, 300_001):
        t = torch.full((count,), float(rank))
        dist.all_reduce(t)
        assert torch.equal(t, torch.full_like(t, total))
        b = torch.full((count,), float(rank))
        dist.broadcast(b, src=n - 1)
        assert torch.equal(b, torch.full_like(b, n - 1.0))
        out = torch.empty(n * count)
        dist.all_gather_single(out, torch.full((count,), float(rank)))
        assert torch.equal(out, torch.arange(n).float().repeat_interleave(count))
        part = torch.empty(count)
        dist.reduce_scatter_single(part, out)
        assert torch.equal(part, torch.full_like(part, float(n * rank)))
        got = torch.empty(n * count)
        dist.all_to_all_single(got, torch.full((n * count,), float(rank)))
        assert torch.equal(got, torch.arange(n).float().repeat_interleave(count))
        sent = dist.isend(torch.full((count,), float(rank)), dst=(rank + 1) % n)
        mail = torch.empty(count)
        dist.recv(mail, src=(rank - 1) % n)
        assert torch.equal(mail, torch.full_like(mail, float((rank - 1) % n)))
        assert sent is not None
        sent.wait()
    dist.barrier()


def lose(rank: int) -> dict[str, object]:
    """Reduce until it fails; tell how."""
    t = torch.ones(400_000)
    print("ready", flush=True)
    while True:
        began = time.monotonic()
        try:
            dist.all_reduce(t)
            t.fill_(1.0)
        except DureError as e:
            report = {
                "error": type(e).__name__,
                "peer": e.peer,
                "host": getattr(e, "host", None),
                "elapsed_s": time.monotonic() - began,
                "text": str(e),
            }
            began = time.monotonic()
            try:
                dist.barrier()
            except DureError as again:
                report["again"] = type(again).__name__
            report["again_s"] = time.monotonic() - began
            return report


def go_on() -> dict[str, object]:
    """Go on with the ranks that are left."""
    began = time.monotonic()
    dist.shrink()
    t = torch.ones(400_000)
    dist.all_reduce(t)
    return {"left": int(t[-1].item()), "shrink_s": time.monotonic() - began}


def main() -> None:
    """Be one rank."""
    what, folder = sys.argv[1], Path(sys.argv[2])
    dist.init_process_group(timeout=timedelta(seconds=40))
    rank, n = dist.get_rank(), dist.get_world_size()
    report: dict[str, object] = {"backend": dist.get_backend()}
    if what == "check":
        check(rank, n)
    else:
        report |= lose(rank)
    if what == "go_on":
        report |= go_on()
    (folder / f"{rank}.json").write_text(json.dumps(report))
    try:
        dist.destroy_process_group()
    except DureError as e:
        print(f"destroy: {e}", file=sys.stderr)


main()
