"""Going on without a rank that died: the others make a smaller group and finish the work.

    dure run --nproc 4 --keep-going examples/09_going_on.py

One rank is killed in the midst of a loop of all_reduces. Every other rank gets `PeerLost`, which
names it; `dist.shrink()` then makes a new default group of those that are left, and the step that
was interrupted is done again. (Without --keep-going, and where only one rank was started, nobody
is killed: the program then just counts.)
"""

import os
import signal

import torch

import dure as dist

NUM_STEPS = 6
KILLED_AT = 3


def main() -> None:
    dist.init_process_group()
    me, num_started = dist.get_rank(), dist.get_world_size()
    victim = num_started - 1 if num_started > 2 else None
    done = 0
    while done < NUM_STEPS:
        if me == victim and done == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        total = torch.ones(1)
        try:
            dist.all_reduce(total)
        except dist.PeerLost as error:
            dist.shrink()
            print(f"rank {error.peer} is gone; I am rank {dist.get_rank()} of what is left")
            continue
        done += 1
        if dist.get_rank() == 0:
            print(f"step {done}: {int(total.item())} ranks took part")
        expected = num_started if victim is None or done <= KILLED_AT else num_started - 1
        assert total.item() == expected
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
