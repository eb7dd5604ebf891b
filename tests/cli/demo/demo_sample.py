"""Events and runs made by hand, in numbers whose sums are known."""

from dure.cli.demo.events import EpochEnd, Start, Step
from dure.cli.demo.results import Run

START = Start(
    data="stripes & dots",
    train_images=40,
    test_images=10,
    image_shape=(8, 8),
    parameters=1234,
    backend="shm",
    steps=20,
    steps_per_epoch=10,
    torch_version="2.13.0",
)


def phases(compute_s, communication_s=0.0):
    return {
        "data wait": 0.0,
        "forward": compute_s / 4,
        "backward": compute_s / 2,
        "exposed communication": communication_s,
        "optimizer": compute_s / 4,
        "other": 0.0,
    }


def finished_run(ranks, step_s, communication_s=0.0):
    """Return a run of 20 steps whose loss halves every step, from 8."""
    run = Run(ranks=ranks, batch_size=4)
    for rank in range(ranks):
        run.add(rank, START)
        for step in range(1, 21):
            part = phases(step_s - communication_s, communication_s)
            run.add(rank, Step(step=step, loss=16 * 0.5**step, phases=part))
        run.add(rank, EpochEnd(epoch=1, accuracy=0.5))
        run.add(rank, EpochEnd(epoch=2, accuracy=0.9))
    run.wall_s = 30.0
    return run
