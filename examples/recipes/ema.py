"""EMA of FSDP weights: an exponential moving average of a sharded model, evaluated and saved.

`AveragedModel` of torch copies the model, and both are sharded: each rank averages its own shards,
and an update sends nothing. The copy is made before `fully_shard`, as a sharded model cannot be
copied. Weights and average are float32: in bfloat16 an update by 0.1 % of the difference is rounded
away. The model computes in bfloat16 by its policy.

The check: one process averages full weights by the formula, w_ema = d w_ema + (1 - d) w.

    dure run --nproc 2 examples/recipes/ema.py          (any number that divides 24)
"""

import tempfile

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import dure as dist
from dure import fsdp
from dure.checkpoint import Checkpointer
from dure.testing import CommRecorder

STEPS, BATCH, DECAY = 8, 24, 0.9


def build() -> nn.Sequential:
    """Return the model, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def batches(rank: int, size: int) -> list[torch.Tensor]:
    """Return this rank's rows of the batch of each step."""
    rows = torch.randn(STEPS, BATCH, 8, generator=torch.Generator().manual_seed(1))
    return [batch.tensor_split(size)[rank] for batch in rows]


def main() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()

    model = build()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))  # before fully_shard
    bfloat16 = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for one, policy in ((model, bfloat16), (average.module, fsdp.MixedPrecisionPolicy())):
        fsdp.fully_shard(one[0], mp_policy=policy)
        fsdp.fully_shard(one, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # of the model alone

    expected: dict[str, torch.Tensor] = {}  # by the formula, from full weights
    for x in batches(rank, size):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with CommRecorder() as recorded:
            average.update_parameters(model)
        assert recorded.ops == [], "an update should send nothing"
        for name, weight in fsdp.stream_full(model):
            before = expected.get(name, weight)
            expected[name] = DECAY * before + (1 - DECAY) * weight

    found = dict(fsdp.stream_full(average.module))
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)
    trained = dict(fsdp.stream_full(model))
    apart = max((trained[name] - found[name]).abs().max().item() for name in found)
    assert apart > 1e-3, "the average should not be the model itself"

    # Evaluate the average as any sharded model, on all ranks.
    x = torch.ones(3, 8)
    with torch.no_grad():
        scores = average(x)
    hidden = torch.relu(nn.functional.linear(x, expected["0.weight"], expected["0.bias"]))
    torch.testing.assert_close(
        scores, nn.functional.linear(hidden, expected["2.weight"], expected["2.bias"])
    )

    # Save and load it beside the model; n_averaged, the number of updates, is in it.
    with tempfile.TemporaryDirectory() as mine:
        folders = [mine]
        dist.broadcast_object_list(folders, src=0)
        run = {"model": model, "average": average, "optimizer": optimizer}
        Checkpointer(folders[0]).save(STEPS, **run)
        with torch.no_grad():
            for tensor in average.state_dict().values():
                tensor.zero_()
        Checkpointer(folders[0]).load(**run)
        dist.barrier()  # no rank removes the folder before all have read
    for name, weight in fsdp.stream_full(average.module):
        assert torch.equal(weight, found[name])
    assert average.n_averaged == STEPS

    if rank == 0:
        held = sum(p.to_local().numel() for p in average.parameters())
        whole = sum(weight.numel() for weight in expected.values())
        print(f"after {STEPS} steps the average is that of the formula, {apart:.4f} from the model")
        print(f"this rank averages {held} of {whole} weights")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
