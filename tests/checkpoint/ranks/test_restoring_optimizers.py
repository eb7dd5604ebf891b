"""Going back within a run: the optimizer has the state of the checkpoint, no more and no less."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from dure.checkpoint import Checkpointer, CheckpointException, DefaultLoadPlanner, load, save
from dure.errors import CheckpointMismatch
from dure.fsdp import fully_shard
from dure.testing import run_ranks


class Net(nn.Module):
    """Two layers, and one that takes part in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.late, self.uses_late = nn.Linear(3, 5), nn.Linear(3, 5), False
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
                parameter.add_(number / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.always(x) + self.late(x) if self.uses_late else self.always(x)


class Decaying(torch.optim.Optimizer):
    """Keeps nested state: a list of tensors and values of a dict."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        del closure
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["sums"] = [torch.zeros_like(p), torch.zeros_like(p)]
                        state["told"] = {"steps": 0}
                    state["told"]["steps"] += 1
                    state["sums"][0].add_(p.grad)
                    state["sums"][1].add_(state["sums"][0], alpha=0.5)
                    p.sub_(state["sums"][1], alpha=0.01 * state["told"]["steps"])


OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.05),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=0.05, amsgrad=True, foreach=False),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    "Decaying": Decaying,
}


def run_of(kind: str, sharded: bool = True) -> tuple[Net, torch.optim.Optimizer]:
    net = Net()
    if sharded:
        fully_shard(net)
    return net, OPTIMIZERS[kind](net.parameters())


def stepped(net: Net, optimizer: torch.optim.Optimizer, numbers: range, uses_late: bool) -> None:
    net.uses_late = uses_late
    for number in numbers:
        optimizer.zero_grad()
        net(torch.linspace(-1, 1 + number, 12).view(4, 3)).square().sum().backward()
        optimizer.step()


def held(value: Any) -> Any:
    """Return a state as numbers."""
    if isinstance(value, torch.Tensor):
        whole: Any = value.full_tensor() if hasattr(value, "full_tensor") else value
        return whole.tolist()
    if isinstance(value, dict):
        return {key: held(inner) for key, inner in value.items()}
    return [held(inner) for inner in value] if isinstance(value, list | tuple) else value


def with_checkpointer(folder: Path, saves: bool, **objects: Any) -> None:
    checkpoints = Checkpointer(folder)
    if saves:
        checkpoints.save(1, **objects)
    else:
        assert checkpoints.load(**objects) == 1


def with_functions(folder: Path, saves: bool, **objects: Any) -> None:
    if saves:
        save(objects, checkpoint_id=folder)
    else:
        assert load(objects, checkpoint_id=folder).missing_keys == []


HISTORIES = {  # steps before and after the save, and whether they use the late layer
    "late before, running not stepped": ((3, True), (0, False)),
    "late before, running without it": ((3, True), (2, False)),
    "late before and in the running": ((3, True), (2, True)),
    "late in the running only": ((3, False), (2, True)),
    "saved before the first step": ((0, False), (2, True)),
}


def _gone_back(rank: int, folder: Path, through: Any, kind: str, history: str) -> None:
    (before, used_before), (after, used_after) = HISTORIES[history]
    net, optimizer = run_of(kind)
    stepped(net, optimizer, range(before), used_before)
    through(folder, True, model=net, optimizer=optimizer)
    saved = held(net.state_dict()), held(optimizer.state_dict())
    stepped(net, optimizer, range(3, 5), True)
    undisturbed = held(net.state_dict()), held(optimizer.state_dict())

    net, optimizer = run_of(kind)  # a run of its own, which goes back to that checkpoint
    stepped(net, optimizer, range(7, 7 + after), used_after)
    memory = [p.to_local().data_ptr() for p in net.parameters()]  # type: ignore[attr-defined]
    through(folder, False, model=net, optimizer=optimizer)
    assert (held(net.state_dict()), held(optimizer.state_dict())) == saved
    assert memory == [p.to_local().data_ptr() for p in net.parameters()]  # type: ignore[attr-defined]
    stepped(net, optimizer, range(3, 5), True)
    assert (held(net.state_dict()), held(optimizer.state_dict())) == undisturbed


@pytest.mark.parametrize("history", HISTORIES)
def test_sharded_run_that_goes_back_is_as_it_was(tmp_path, history):
    run_ranks(2, _gone_back, tmp_path / "a", with_checkpointer, "AdamW", history)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_goes_back(tmp_path, kind):
    for name in ("late before, running without it", "late in the running only"):
        run_ranks(2, _gone_back, tmp_path / name, with_checkpointer, kind, name)


@pytest.mark.parametrize("history", HISTORIES)
def test_sharded_run_that_goes_back_through_load_is_as_it_was(tmp_path, history):
    run_ranks(2, _gone_back, tmp_path, with_functions, "AdamW", history)


def _into_others(rank: int, folder: Path, sharded: bool) -> Any:
    net, optimizer = run_of("AdamW", sharded)
    stepped(net, optimizer, range(1), True)
    load({"model": net, "optimizer": optimizer}, checkpoint_id=folder)
    return held(net.state_dict()), held(optimizer.state_dict()["state"])


def test_state_that_is_missing_is_made_in_the_sharding_that_is_there(tmp_path):
    net, optimizer = run_of("AdamW", sharded=False)
    stepped(net, optimizer, range(2), False)
    save({"model": net, "optimizer": optimizer}, checkpoint_id=tmp_path)
    expected = held(net.state_dict()), held(optimizer.state_dict()["state"])
    for ranks, sharded in ((1, False), (2, True), (3, True)):
        assert run_ranks(ranks, _into_others, tmp_path, sharded) == [expected] * ranks


def _partly(rank: int, folder: Path) -> None:
    net, optimizer = run_of("AdamW")
    stepped(net, optimizer, range(2), False)
    save({"optimizer": optimizer}, checkpoint_id=folder)
    saved = held(optimizer.state_dict()["state"])
    stepped(net, optimizer, range(2, 4), True)
    kept = held(optimizer.state_dict()["state"])
    planner = DefaultLoadPlanner(allow_partial_load=True)
    load({"optimizer": optimizer}, checkpoint_id=folder, planner=planner)
    assert held(optimizer.state_dict()["state"]) == {**kept, **saved}
    assert len(kept) == 4 and len(saved) == 2


def test_partial_load_keeps_state_that_the_checkpoint_has_not(tmp_path):
    run_ranks(2, _partly, tmp_path)


def _absent(rank: int, folder: Path) -> None:
    net, optimizer = run_of("AdamW")
    stepped(net, optimizer, range(2), True)
    save({"model": net}, checkpoint_id=folder)
    before = held(optimizer.state_dict())
    with pytest.raises(CheckpointException):
        load({"optimizer": optimizer}, checkpoint_id=folder)
    assert held(optimizer.state_dict()) == before


def test_a_checkpoint_without_the_optimizer_is_refused_and_changes_nothing(tmp_path):
    run_ranks(2, _absent, tmp_path)


class Factored(torch.optim.Optimizer):
    """State of another shape than its parameter's, and a step that wants more than gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        closure()
        for p in self.param_groups[0]["params"]:
            self.state[p]["sum"] = torch.zeros(7)


def _unknown(rank: int, folder: Path) -> None:
    net = run_of("AdamW")[0]
    optimizer = Factored(net.parameters())
    optimizer.step(lambda: None)
    save({"optimizer": optimizer}, checkpoint_id=folder)
    with pytest.raises(CheckpointException) as caught:
        load({"optimizer": Factored(net.parameters())}, checkpoint_id=folder)
    assert isinstance(caught.value.failures[rank][0], CheckpointMismatch)


def test_state_whose_division_is_not_known_is_refused(tmp_path):
    run_ranks(2, _unknown, tmp_path)


class Counting(torch.optim.SGD):
    """Has state that is not of a parameter."""

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().step(closure)
        state: Any = cast(Any, self.state)["all"]
        state["steps"] = state.get("steps", 0) + 1
        state["sums"] = (state.get("sums", (torch.zeros(2),))[0] + 1,)


class Around(torch.optim.Optimizer):
    """Its state is that of another optimizer, and what it adds."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.count = inner, torch.zeros(1)

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.inner.step(closure)
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict["inner"])
        self.count = state_dict["count"]


def _stepped(made: Any, count: int) -> Any:
    module = nn.Linear(2, 2)
    optimizer = made(module.parameters())
    for _ in range(count):
        module(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("steps", [0, 3])
def test_state_that_is_not_of_a_parameter_comes_back(tmp_path, steps):
    save({"optimizer": _stepped(Counting, 2)}, checkpoint_id=tmp_path)
    optimizer = _stepped(Counting, steps)
    assert load({"optimizer": optimizer}, checkpoint_id=tmp_path)[:2] == ([], [])
    assert optimizer.state["all"]["steps"] == 2
    assert optimizer.state["all"]["sums"][0].tolist() == [2, 2]


def test_an_optimizer_whose_state_has_another_form_comes_back(tmp_path):
    def made(params: Any) -> Around:
        return Around(torch.optim.SGD(params))

    save({"optimizer": _stepped(made, 2)}, checkpoint_id=tmp_path)
    optimizer = _stepped(made, 3)
    load({"optimizer": optimizer}, checkpoint_id=tmp_path)
    assert optimizer.count.tolist() == [2]


class Noting(Decaying):
    """Writes down its steps outside of its state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.steps, self.last = list[int](), dict[str, int]()

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().step(closure)
        self.steps.append(len(self.steps))
        self.last["step"] = len(self.steps)


def test_lists_and_dicts_of_a_fresh_optimizer_are_not_changed_by_a_load(tmp_path: Path) -> None:
    saved, loaded = Net(), Net()
    optimizer, fresh = Noting(saved.parameters()), Noting(loaded.parameters())
    saved(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save({"optimizer": optimizer}, checkpoint_id=tmp_path)
    load({"optimizer": fresh}, checkpoint_id=tmp_path)
    assert (fresh.steps, fresh.last) == ([], {})
    assert len(fresh.state) == len(optimizer.state) == 2


def test_optimizer_whose_hooks_leave_out_a_group_is_loaded(tmp_path: Path) -> None:
    net = Net()
    groups = [{"params": net.always.parameters()}, {"params": net.late.parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)

    def without_the_last(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        return state | {"param_groups": state["param_groups"][:1]}

    def with_the_last(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        last = optimizer.state_dict()["param_groups"][0] | {"params": [2, 3]}
        return state | {"param_groups": [*state["param_groups"], last]}

    optimizer.register_state_dict_post_hook(without_the_last)
    optimizer.register_load_state_dict_pre_hook(with_the_last)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save({"optimizer": optimizer}, checkpoint_id=tmp_path)
    wanted = optimizer.state[net.always.weight]["momentum_buffer"].clone()
    optimizer.state[net.always.weight]["momentum_buffer"].zero_()
    load({"optimizer": optimizer}, checkpoint_id=tmp_path)
    assert torch.equal(optimizer.state[net.always.weight]["momentum_buffer"], wanted)
