"""Checkpoints of several ranks: who writes what, other world sizes, errors on all ranks."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest
import torch
from torch import nn

import dure
from dure.checkpoint import Checkpointer, PerRank, saving
from dure.checkpoint.randomness import random_state
from dure.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotWritten,
    UsageError,
)
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


@SHARDED
def test_any_number_of_ranks_loads_what_two_have_saved(tmp_path, sharded):
    paths = run_ranks(2, _save, tmp_path, sharded, 5)
    assert len(set(paths)) == 1
    parts = {p.name for p in Path(paths[0]).glob("*.safetensors")}
    assert parts == {f"part-000001-0000{r}.safetensors" for r in range(2 if sharded else 1)}
    (alone,) = run_ranks(1, _load, tmp_path, False)
    assert alone[0] == 5 and len(alone[2]) == 6
    for ranks in (2, 3):
        assert run_ranks(ranks, _load, tmp_path, True) == [alone] * ranks
    model = model_of(98)  # and a process that knows of no group
    assert Checkpointer(tmp_path).load(model=model) == 5
    assert values_of(model) == alone[1]


class Shards(torch.optim.SGD):
    """An optimizer of which each rank holds the entries with its own parity."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.whole = None
        for number, p in enumerate(self.param_groups[0]["params"]):
            if number % dure.get_world_size() == dure.get_rank():
                self.state[p] = {"momentum": torch.full_like(p, number)}

    def local_state_dict(self):
        return super().state_dict()

    def consolidate_state_dict(self, to=0):
        parts = [None] * dure.get_world_size()
        dure.all_gather_object(parts, self.local_state_dict())
        self.whole = {n: e for part in parts for n, e in part["state"].items()}  # type: ignore[index]

    def state_dict(self):
        return {**super().state_dict(), "state": self.whole}

    def load_state_dict(self, state_dict):
        self.whole = {n: e["momentum"].tolist() for n, e in state_dict["state"].items()}


def _shards(rank, folder, sharded, saves):
    optimizer = Shards(model_of(1).parameters())
    if saves:
        Checkpointer(folder, sharded=sharded).save(1, optimizer=optimizer)
    Checkpointer(folder).load(optimizer=optimizer)
    return optimizer.whole


@SHARDED
def test_sharded_optimizer_is_whole_in_the_file(tmp_path, sharded):
    saved = run_ranks(2, _shards, tmp_path, sharded, True)
    expected = {
        number: torch.full(p.shape, float(number)).tolist()
        for number, p in enumerate(model_of(1).parameters())
    }
    assert saved == [expected] * 2
    assert run_ranks(3, _shards, tmp_path, sharded, False) == [expected] * 3


def _zero(rank, folder, sharded, steps):
    """Train with Adam's state divided among the ranks; return the weights after each step."""
    model = dure.DistributedDataParallel(model_of(1))
    optimizer = dure.ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    checkpoints = Checkpointer(folder, sharded=sharded)
    checkpoints.load(model=model, optimizer=optimizer)
    curve = []
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.linspace(0, 1 + step, 12).reshape(4, 3)).square().sum().backward()
        optimizer.step()
        curve.append(values_of(model.module))
        if step == 1:
            checkpoints.save(step, model=model, optimizer=optimizer)
    return curve


@SHARDED
def test_zero_redundancy_optimizer_resumes_in_any_world(tmp_path, sharded):
    run_ranks(2, _zero, tmp_path, sharded, 2)
    resumed = {n: run_ranks(n, _zero, tmp_path, sharded, 1)[0] for n in (2, 3)}
    inner = model_of(1)
    optimizer = torch.optim.Adam(inner.parameters(), lr=0.1)
    assert Checkpointer(tmp_path).load(model=inner, optimizer=optimizer) == 1
    inner(torch.linspace(0, 1, 12).reshape(4, 3)).square().sum().backward()
    optimizer.step()
    assert resumed[2] == [values_of(inner)]
    # The mean of three equal gradients may be rounded, and Adam divides by their size.
    assert resumed[3] == [pytest.approx(values_of(inner), abs=1e-6)]


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


@pytest.mark.parametrize("failing", [0, 1])
def test_rank_that_cannot_write_fails_all_and_the_older_checkpoint_stays(
    tmp_path, monkeypatch, failing
):
    run_ranks(2, _save, tmp_path, True, 1)
    real = saving.write_slices

    def full(path, *given):
        if f"-0000{failing}.safetensors" in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, *given)

    monkeypatch.setattr(saving, "write_slices", full)

    def save(rank):
        with pytest.raises(CheckpointNotWritten) as caught:
            _save(rank, tmp_path, True, 2)
        return caught.value.rank

    assert run_ranks(2, save) == [failing] * 2
    assert [p.name for p in tmp_path.iterdir()] == ["000001-step-1"]


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


def _uneven(rank, folder):
    loader = dure.DataLoader(range(11), 2, shuffle=True, pad=False)
    seen = []
    for step, batch in enumerate(loader):
        seen += batch.tolist()
        if step == 1:
            break
    Checkpointer(folder).save(2, loader=loader)
    return seen


def _rest(rank, folder):
    loader = dure.DataLoader(range(11), 1, shuffle=True, pad=False)
    Checkpointer(folder).load(loader=loader)
    return [i for batch in loader for i in batch.tolist()]


def test_loader_goes_on_with_another_number_of_ranks(tmp_path):
    first = [i for part in run_ranks(2, _uneven, tmp_path) for i in part]
    rest = [i for part in run_ranks(3, _rest, tmp_path) for i in part]
    assert len(first) == 8
    assert sorted(first + rest) == list(range(11))


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


@pytest.mark.parametrize("steps", [(6, 5), (6, 99), (5, 5), (99, 5)])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_that_end_a_batch_apart_continue_in_any_number(tmp_path, steps, num_ranks):
    """Six samples are rank 0's, and five rank 1's."""
    first = _saved_once(tmp_path, steps, pad=False)
    assert sorted(first + _resumed(tmp_path, num_ranks, pad=False)) == list(range(11))


def _loader_at(rank, epoch, steps, num_ranks=2):
    """Return a loader of five samples after `steps` batches of an epoch."""
    sampler = dure.DistributedSampler(range(5), num_ranks, rank, shuffle=False, pad=False)
    loader = dure.DataLoader(range(5), sampler=sampler)
    loader.set_epoch(epoch)
    for _ in zip(range(steps), loader, strict=False):
        pass
    return loader


def _load_both(rank, folder, num_ranks):
    loader, model = _loader_at(rank, 0, 0, num_ranks), model_of(9)
    before = values_of(model)
    Checkpointer(folder).load(model=model, loader=loader)
    return loader.epoch, [int(i) for i in loader], values_of(model) != before


def test_ranks_in_different_epochs_continue_where_each_was(tmp_path):
    """Rank 1 has fewer samples per epoch, and is ahead in a program without a barrier."""

    def body(rank):
        Checkpointer(tmp_path).save(1, model=model_of(1), loader=_loader_at(rank, rank, 1 + rank))

    run_ranks(2, body)
    resumed = run_ranks(2, _load_both, tmp_path, 2)
    assert resumed == [(0, [2, 4], True), (1, [], True)]
    with pytest.raises(CheckpointMismatch, match="different positions"):
        _load_both(0, tmp_path, 1)


def test_positions_of_older_checkpoints_are_of_the_epoch_of_rank_0():
    loaders = [_loader_at(0, 3, 2), _loader_at(1, 3, 1)]
    positions = [{k: v for k, v in each.own_position().items() if k != "epoch"} for each in loaders]
    found = [
        each.state_at(loaders[0].state_dict(), positions, rank, 2)["sampler"]
        for rank, each in enumerate(loaders)
    ]
    assert [(each["epoch"], each["consumed"]) for each in found] == [(3, 4), (3, 2)]


@pytest.mark.parametrize("saved", ["other length", "other kind"])
def test_state_of_another_loader_is_refused_before_anything_is_changed(tmp_path, saved):
    loaders = {
        "other length": dure.DataLoader(range(7)),
        "other kind": dure.DataLoader(
            range(5), sampler=torch.utils.data.SequentialSampler(range(5))
        ),
    }
    Checkpointer(tmp_path).save(1, model=model_of(1), loader=loaders[saved])
    model = model_of(2)
    before = values_of(model)
    with pytest.raises(CheckpointMismatch, match="another order"):
        Checkpointer(tmp_path).load(model=model, loader=_loader_at(0, 0, 0))
    assert values_of(model) == before
