"""A program for ranks on hosts: it reduces until the folder given has a file `finish`.

Each rank writes its process number into the file `up RANK` there when it has reduced, and after
each step a line into the file `steps` that all share: its round, its host, its rank.
"""

import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch

import dure as dist

STEP_S = 0.05


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group(timeout=timedelta(seconds=60))
    rank, finish = dist.get_rank(), torch.zeros(10_000)
    line = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} {socket.gethostname()} {rank}\n"
    while not finish[0]:
        finish = torch.full_like(finish, float((folder / "finish").exists()))
        dist.all_reduce(finish)
        with (folder / "steps").open("a") as steps:
            steps.write(line)
        (folder / f"up {rank}").write_text(str(os.getpid()))
        time.sleep(STEP_S)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
