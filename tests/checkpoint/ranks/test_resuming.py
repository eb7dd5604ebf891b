"""Checkpoints of several ranks: state of each rank, positions in the data, errors on all ranks."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from torch import nn

import dure
from dure.checkpoint import Checkpointer, PerRank
from dure.checkpoint.randomness import random_state
from dure.checkpoint.slice_files import SliceFile
from dure.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, UsageError
from dure.testing import run_ranks

SHARDED = pytest.mark.parametrize("sharded", [False, True])


def model_of(seed: int) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.rand(p.shape, generator=generator))
    return model


def values_of(model: nn.Module) -> list[float]:
    return [x for p in model.state_dict().values() for x in p.flatten().tolist()]


def _save(rank, folder, sharded, seed):
    ddp = dure.DistributedDataParallel(model_of(seed))
    optimizer = torch.optim.AdamW(ddp.parameters())
    ddp(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    return str(Checkpointer(folder, sharded=sharded).save(seed, model=ddp, optimizer=optimizer))


def _load(rank, folder, wrapped):
    inner = model_of(99)
    model = dure.DistributedDataParallel(inner) if wrapped else inner
    optimizer = torch.optim.AdamW(model.parameters())
    step = Checkpointer(folder).load(model=model, optimizer=optimizer)
    return step, values_of(inner), [s["exp_avg"].tolist() for s in optimizer.state.values()]


def _own(rank, folder, sharded, saves):
    checkpoints = Checkpointer(folder, sharded=sharded)
    if saves:
        checkpoints.save(1, mine=PerRank({"x": torch.full((2,), float(rank)), "rank": rank}))
    loaded = {}
    checkpoints.load(mine=PerRank(loaded))
    return loaded["rank"], loaded["x"].tolist()


@SHARDED
def test_state_of_each_rank_comes_back_to_that_rank_and_to_no_other_number(tmp_path, sharded):
    expected = [(r, [float(r)] * 2) for r in range(3)]
    assert run_ranks(3, _own, tmp_path, sharded, True) == expected
    with pytest.raises(CheckpointMismatch):
        run_ranks(2, _own, tmp_path, sharded, False)


def test_new_ranks_are_seeded_by_rule_and_old_ones_go_on(tmp_path, monkeypatch):
    torch.manual_seed(3)
    random.seed(3)
    Checkpointer(tmp_path).save(1, state={})
    saved = random_state()
    restored, seeded = [], []
    monkeypatch.setattr("dure.checkpoint.resuming.restore_random_state", restored.append)
    monkeypatch.setattr(
        "dure.checkpoint.resuming.seed_new_rank", lambda first, rank: seeded.append((first, rank))
    )
    run_ranks(3, lambda _: Checkpointer(tmp_path).load(state={}))
    assert [r["torch"] for r in restored] == [saved["torch"]]
    assert sorted(rank for _, rank in seeded) == [1, 2]
    assert all(first["torch"] == saved["torch"] for first, _ in seeded)


class Broken:
    def state_dict(self):
        raise ZeroDivisionError

    def load_state_dict(self, state):
        del state


@pytest.mark.parametrize(
    ("what", "error"),
    [
        (lambda rank: PerRank({"x": object() if rank else 1}), UsageError),
        (lambda rank: PerRank(Broken() if rank else {}), CheckpointError),
        (lambda rank: {"x": torch.ones(2 + rank)}, CheckpointError),
    ],
    ids=["value", "object", "shape"],
)
def test_what_one_rank_cannot_save_fails_all(tmp_path, what, error):
    def save(rank):
        with pytest.raises(error) as caught:
            Checkpointer(tmp_path, sharded=True).save(1, mine=what(rank))
        return caught.value.seen

    first, second = run_ranks(2, save)
    assert first == second
    assert error is not UsageError or "ranks.1.mine.x" in first
    assert list(tmp_path.iterdir()) == []


def test_each_rank_checks_its_share_and_all_refuse_alike(tmp_path):
    for seed in (1, 2):
        run_ranks(3, _save, tmp_path, True, seed)
    part = tmp_path / "000002-step-2" / "part-000001-00002.safetensors"
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    results = run_ranks(2, _load, tmp_path, True)
    assert results[0] == results[1] and results[0][0] == 1
    (tmp_path / "000001-step-1" / "part-000001-00000.safetensors").unlink()

    def load(rank):
        with pytest.raises(CheckpointDamaged) as caught:
            _load(rank, tmp_path, False)
        return sorted(caught.value.refused)

    names = run_ranks(2, load)
    assert names[0] == names[1] and len(names[0]) == 2


class _Batches:
    """Batches of a user's own sampler; ranks may have different numbers of them."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def _own_batches(rank, folder, steps):
    """Load, take so many batches of this rank's, and save; return what was seen."""
    batches = [[[0], [1, 2]], [[3], [4], [5], [6, 7]]][rank]
    loader = dure.DataLoader(range(8), batch_sampler=_Batches(batches))
    checkpoints = Checkpointer(folder)
    checkpoints.load(loader=loader)
    seen = [batch.tolist() for _, batch in zip(range(steps[rank]), loader, strict=False)]
    checkpoints.save(1, loader=loader)
    return seen


def test_load_of_a_divided_model_opens_on_each_rank_only_the_files_that_it_needs(
    tmp_path, monkeypatch
):
    """Files are equally long, so a rank checks the one from which it fills its rows."""
    opened: dict[int, set[str]] = {}
    real = SliceFile.__init__

    def noted(file, path, *args, **options):
        opened.setdefault(threading.get_ident(), set()).add(path.name)
        real(file, path, *args, **options)

    def body(rank):
        mesh = dure.init_device_mesh("cpu", (8,))
        model = nn.Linear(4, 8, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.arange(32.0).view(8, 4))
        dure.fsdp.fully_shard(model, mesh=mesh)
        Checkpointer(tmp_path, sharded=True).save(1, model=model)
        with torch.no_grad():
            model.weight.to_local().zero_()
        dure.barrier()
        if rank == 0:
            monkeypatch.setattr(SliceFile, "__init__", noted)
        dure.barrier()
        Checkpointer(tmp_path, sharded=True).load(model=model)
        return model.weight.to_local().tolist(), opened[threading.get_ident()]

    for rank, (row, files) in enumerate(run_ranks(8, body)):
        assert row == [[4 * rank, 4 * rank + 1, 4 * rank + 2, 4 * rank + 3]]
        assert files == {f"part-000001-{rank:05d}.safetensors"}


def test_ranks_with_different_numbers_of_batches_continue_where_each_was(tmp_path):
    first = run_ranks(2, _own_batches, tmp_path / "a", (99, 3))
    assert first == [[[0], [1, 2]], [[3], [4], [5]]]
    second = run_ranks(2, _own_batches, tmp_path / "a", (99, 99))
    assert second == [[], [[6, 7]]]


def _saved_once(folder, steps, **how):
    def body(rank):
        loader = dure.DataLoader(range(11), shuffle=True, **how)
        model = nn.Linear(1, 1)
        nn.init.ones_(model.weight)
        nn.init.ones_(model.bias)
        walk = zip(range(steps[rank]), loader, strict=False)
        seen = [i for _, batch in walk for i in batch.tolist()]
        Checkpointer(folder).save(1, model=model, loader=loader)
        return seen

    return [i for part in run_ranks(len(steps), body) for i in part]


def _resumed(folder, num_ranks, **how):
    def body(rank):
        loader = dure.DataLoader(range(11), shuffle=True, **how)
        model = nn.Linear(1, 1)
        before = values_of(model)
        try:
            Checkpointer(folder).load(model=model, loader=loader)
        except CheckpointMismatch:
            assert values_of(model) == before  # nothing was changed
            raise
        rest = [i for batch in loader for i in batch.tolist()]
        loader.set_epoch(loader.epoch + 1)
        assert len(loader) == len([*loader]) >= 11 // num_ranks
        return rest

    return [i for part in run_ranks(num_ranks, body) for i in part]


@pytest.mark.parametrize("steps", [(3, 1), (0, 2), (6, 4)])
def test_ranks_that_are_not_in_step_continue_where_each_was(tmp_path, steps):
    first = _saved_once(tmp_path, steps, pad=False)
    assert len(first) == sum(steps)
    assert sorted(first + _resumed(tmp_path, 2, pad=False)) == list(range(11))
    for num_ranks in (1, 3):
        with pytest.raises(CheckpointMismatch, match="different positions"):
            _resumed(tmp_path, num_ranks, pad=False)
