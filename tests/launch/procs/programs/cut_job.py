"""A job whose network a test cuts: it trains for as long as the folder CREW has no file `finish`.

The argument says how: "rounds" starts again from its checkpoint, "elastic" goes on by itself. After
each step rank 0 of the group writes into the folder's `ledger`, which stands for the checkpoint on
a disk that all hosts share,

    when (ns, the clock of the machine)   host   which group   which step   how many ranks

A test reads there who trained when: two groups at a time must not.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch

import dure
from dure.elastic import Options, State

FOLDER = Path(os.environ["CREW"])
LEDGER = FOLDER / "ledger"
STEP_S = 0.05


def step_done(step: int, group: str) -> None:
    """Write a step into the ledger."""
    host = os.environ["DURE_TEST_HOST"]
    line = f"{time.monotonic_ns()} {host} {group} {step} {dure.get_world_size()}\n"
    with LEDGER.open("a") as ledger:
        ledger.write(line)


def all_done(step: int) -> bool:
    """Make a step with all ranks; tell whether the job is to end."""
    finish = torch.tensor([float((FOLDER / "finish").exists()), 1.0])
    dure.all_reduce(finish)
    assert finish[1] == dure.get_world_size()
    time.sleep(STEP_S)
    return finish[0].item() > 0


def rounds() -> None:
    """Train from the last step in the ledger."""
    dure.init_process_group(timeout=timedelta(seconds=30))
    lines = LEDGER.read_text().splitlines() if LEDGER.exists() else []
    step = int(lines[-1].split()[3]) if lines else 0
    group = f"round-{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.getpid()}"
    while not all_done(step):
        step += 1
        if dure.get_rank() == 0:
            step_done(step, group)
    dure.destroy_process_group()


def train(state: State) -> int:
    """Train from the last committed step."""
    group = f"epoch-{len(state.recoveries)}-{os.getpid()}"
    while not all_done(state.step):
        state.step += 1
        state.commit()
        if dure.get_rank() == 0:
            step_done(state.step, group)
    return state.step


def main() -> None:
    """Be a rank."""
    torch.set_num_threads(1)
    if sys.argv[1] == "elastic":
        options = Options(timeout=timedelta(seconds=60), enough_s=20)
        dure.elastic.run(train, State(step=0), options)
    else:
        rounds()


if __name__ == "__main__":
    main()
