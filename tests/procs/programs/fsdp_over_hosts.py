"""A rank of a job over several hosts: trains sharded, and writes how far it is from one rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import dure as dist
from procs import fsdp_ranks


def main() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    far = {way: fsdp_ranks.trains_as_one(rank, size, way)[1] for way in ("shared", "gathered")}
    report = {"backend": dist.get_backend(), **far}
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
