"""An elastic program for ranks on hosts: it writes down which samples each epoch has had.

The first epoch waits before its first step until there are 2 ranks, before its fourth until there
are 3, and before its seventh until there are 2 again. At the end each rank writes into the file
`had on HOST` the samples that all ranks have had, and the number of ranks in each step, by epoch.
"""

import json
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn

import dure as dist
from dure.data import DataLoader
from dure.elastic import Options, State

SAMPLES, EACH, EPOCHS = 100, 4, 2
SIZES = {0: 2, 3: 3, 6: 2}
"""How many ranks there are to be, from which step on."""


def wait_for_size(state: State, folder: Path) -> None:
    while dist.get_world_size() != SIZES.get(state.steps, dist.get_world_size()):
        (folder / f"waits {state.steps}").touch()
        time.sleep(0.05)
        state.commit()


def train(state: State, folder: Path) -> bool:
    model = state.model
    if dist.get_world_size() > 1:
        model = dist.DistributedDataParallel(state.model)
    wait_for_size(state, folder)
    state.loader = DataLoader(torch.arange(SAMPLES), EACH, shuffle=True)
    while state.epoch < EPOCHS:
        state.loader.set_epoch(state.epoch)
        for index in state.loader:
            state.optimizer.zero_grad()
            model(index.float()[:, None]).square().mean().backward()
            state.optimizer.step()
            all_ranks: list[list[int]] = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(all_ranks, index.tolist())
            state.samples[state.epoch] += [i for one in all_ranks for i in one]
            state.sizes[state.epoch].append(dist.get_world_size())
            state.steps += 1
            state.commit()
            wait_for_size(state, folder)
        state.epoch += 1
    return True


def main() -> None:
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    empty: list[list[list[int]]] = [[[] for _ in range(EPOCHS)] for _ in range(2)]
    state = State(
        model=model, optimizer=optimizer, epoch=0, steps=0, samples=empty[0], sizes=empty[1]
    )
    options = Options(timeout=timedelta(seconds=60))
    assert dist.elastic.run(lambda state: train(state, folder), state, options)
    (folder / f"had on {socket.gethostname()}").write_text(json.dumps([state.samples, state.sizes]))


if __name__ == "__main__":
    main()
