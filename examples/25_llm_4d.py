"""A Llama trained on a mesh of several axes at once, and the same steps on one rank.

`examples/llm` has the model and the training program, whose flags say how many ranks there are
along each axis. Here the number of ranks chooses them: two ranks are two stages of a pipeline;
three shard the parameters; four are two stages, with each layer cut in two; eight also shard.

How can one know that it is right? One rank makes the same steps: losses agree to 10 digits.

    dure run --nproc 2 examples/25_llm_4d.py          (or 1, 3, 4, 8)
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

import dure as dist
from dure.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parent / "llm"))

from train import Flags, Trainer

STEPS = 5
MESHES = {
    1: {},
    2: {"pp": 2},
    3: {"fsdp": 3},
    4: {"pp": 2, "tp": 2},
    8: {"pp": 2, "fsdp": 2, "tp": 2},
}
ONE = Flags(dtype="float64", microbatches=4, batch=24)  # 24 = 4 microbatches of 1, 2 or 3 parts


def losses(flags: Flags) -> list[float]:
    """Train, and return the losses of whole batches, which all ranks know."""
    trainer = Trainer(flags)
    return [trainer.train()[0] for _ in range(STEPS)]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group()
    mesh = MESHES[dist.get_world_size()]
    schedule = "Interleaved1F1B" if "pp" in mesh else "1F1B"
    found = losses(replace(ONE, **mesh, schedule=schedule))
    if dist.get_rank() == 0:
        expected = run_ranks(1, lambda _: losses(ONE))[0]  # a world of its own, in a thread
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
        print(f"{mesh or 'one rank'}: losses {found[0]:.4f} to {found[-1]:.4f}, those of one rank")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
