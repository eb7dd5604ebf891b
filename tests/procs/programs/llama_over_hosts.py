"""A rank of a job over several hosts: a Llama cut over its ranks trains as on one rank.

Argument: a folder; a file "passed-RANK" is written there.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import dure as dist
from procs.test_tensor_parallel_processes import PLANS, trains

if __name__ == "__main__":
    dist.init_process_group()
    for plan in PLANS:
        trains(dist.get_rank(), plan)
    Path(sys.argv[1], f"passed-{dist.get_rank()}-{dist.get_backend()}").touch()
    dist.destroy_process_group()
