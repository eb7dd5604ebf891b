"""Loading: into any sharding, dtype and structure; what does not fit changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dure.checkpoint import (
    Checkpointer,
    CheckpointException,
    DefaultLoadPlanner,
    FileSystemReader,
    load,
    save,
)
from dure.errors import CheckpointMismatch
from dure.fsdp import fully_shard
from dure.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from dure.tensor.placement_types import StridedShard
from dure.testing import run_ranks
from tests.checkpoint.saved_states import counted, load_one, save_one

R, S0, S1 = Replicate(), Shard(0), Shard(1)
ONE_AXIS = [[R], [S0], [S1]]
TWO_AXES = [
    [R, R],
    [S0, R],
    [R, S1],
    [S0, S1],
    [S1, S0],
    [S0, S0],
    [StridedShard(0, split_factor=2), S0],
]


@pytest.mark.parametrize("placements", [[R], [S0], [S1]], ids=str)
def test_what_four_have_saved_is_loaded_in_every_sharding(tmp_path, placements):
    run_ranks(4, save_one, tmp_path, (4,), placements)
    for sizes in [(1,), (2,), (3,)]:
        for wanted in ONE_AXIS:
            read = run_ranks(sizes[0], load_one, tmp_path, sizes, wanted)
            assert [num for num, _ in read] == [size for _, size in read]
    for wanted in TWO_AXES:
        read = run_ranks(4, load_one, tmp_path, (2, 2), wanted)
        assert [num for num, _ in read] == [size for _, size in read]


def test_nested_state_plain_tensors_numbers_and_dtypes(tmp_path):
    def state(filled):
        k = 1 if filled else 0
        return {
            "a": {"b": [torch.full((2,), 3.0 * k), {"c": 7 * k}], "plain": [1 * k, 2 * k]},
            "number": torch.tensor(5 * k),
            "half": torch.full((3,), 1.5 * k, dtype=torch.bfloat16),
            "complex": torch.full((2,), (1 + 2j) * k, dtype=torch.complex64),
            "column": torch.arange(6.0).reshape(2, 3).t() * k,
            "none": torch.full((0, 3), 0.0),
            "words": "yes" if filled else "no",
            "betas": (0.5 * k, 0.25 * k),
            "pair": (torch.full((1,), 9.0 * k), 8 * k),
            "keys": {0: 4 * k},
        }

    save(state(True), checkpoint_id=tmp_path)
    found = state(False)
    inner, column = found["a"]["b"][0], found["column"]
    assert load(found, checkpoint_id=tmp_path)[:2] == ([], [])
    assert found["a"]["b"][0] is inner and inner.tolist() == [3, 3]
    assert found["a"]["b"][1] == {"c": 7} and found["a"]["plain"] == [1, 2]
    assert found["number"].item() == 5 and found["half"].tolist() == [1.5] * 3
    assert found["complex"].tolist() == [1 + 2j] * 2
    assert found["pair"][0].item() == 9 and found["pair"][1] == 8
    assert found["column"] is column and column.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert (found["words"], found["betas"], found["keys"]) == ("yes", (0.5, 0.25), {0: 4})
    held = FileSystemReader(tmp_path).read_metadata()
    assert held.state_dict_metadata["a.b.0"].size == (2,)
    assert held.planner_data["keys.0"] == ("keys", 0)


class _Planner(DefaultLoadPlanner):
    pass


@pytest.mark.parametrize("way", ["load", "planner", "Checkpointer"])
def test_objects_are_loaded_in_one_order_on_all_ranks(tmp_path, way):
    class Noting:
        def __init__(self, name, calls):
            self.name, self.calls = name, calls

        def state_dict(self):
            self.calls.append(f"state of {self.name}")
            return {"x": torch.zeros(1)}

        def load_state_dict(self, state):
            self.calls.append(f"load {self.name}")

    def body(rank):
        calls = []
        names = ["first", "second"][:: -1 if rank else 1]
        state = {name: Noting(name, calls) for name in names}
        if way == "Checkpointer":
            Checkpointer(tmp_path).save(1, **state)
            calls.clear()
            Checkpointer(tmp_path).load(**state)
        else:
            save(state, checkpoint_id=tmp_path)
            calls.clear()
            planner = _Planner() if way == "planner" else None
            load(state, checkpoint_id=tmp_path, planner=planner)
        return calls

    loads = ["load first", "load second"]
    states = [] if way == "Checkpointer" else ["state of first", "state of second"]
    assert run_ranks(2, body) == [states + loads] * 2


@pytest.mark.parametrize("kind", [None, _Planner])
def test_tensors_on_the_meta_device_are_replaced_by_loaded_ones(tmp_path, kind):
    def body(rank):
        planner = kind and kind()
        mesh = init_device_mesh("cpu", (2,))
        with torch.device("meta"):
            layer, plain = nn.Linear(2, 3), torch.empty(2, dtype=torch.float64)
            rows = distribute_tensor(torch.empty(3, 2), mesh, [S0])
        found = {"layer": layer.state_dict(), "plain": plain, "rows": rows, "new": plain}
        with pytest.raises(CheckpointException):
            load(found, checkpoint_id=tmp_path, planner=planner)
        assert found["plain"] is plain and (planner or found["layer"]["weight"].is_meta)
        del found["new"]
        load(found, checkpoint_id=tmp_path, planner=planner)
        layer.load_state_dict(found["layer"], assign=True)
        assert layer.weight.tolist() == [[0, 1], [2, 3], [4, 5]] and layer.bias.tolist() == [7] * 3
        assert found["plain"].tolist() == [0, 1] and found["plain"].dtype == torch.float64
        assert found["rows"].placements == (S0,) and found["rows"].device_mesh is mesh
        with pytest.raises(CheckpointException):  # it would be copied into nothing
            load({"layer": nn.Linear(2, 3, device="meta")}, checkpoint_id=tmp_path, planner=planner)
        return found["rows"].to_local().tolist()

    layer = {"weight": counted(3, 2), "bias": torch.full((3,), 7.0)}
    save({"layer": layer, "plain": counted(2), "rows": counted(3, 2)}, checkpoint_id=tmp_path)
    assert run_ranks(2, body) == [[[0, 1], [2, 3]], [[4, 5]]]


def test_missing_and_unexpected_keys(tmp_path):
    save({"a": counted(2), "b": 1}, checkpoint_id=tmp_path)
    state = {"a": torch.zeros(2), "c": torch.zeros(1)}
    with pytest.raises(
        CheckpointException, match=r"Missing key in checkpoint state_dict: c\."
    ) as caught:
        load(state, checkpoint_id=tmp_path)
    assert list(caught.value.failures) == [0] and state["a"].tolist() == [0, 0]
    some = DefaultLoadPlanner(allow_partial_load=True)
    loaded = load(state, storage_reader=FileSystemReader(tmp_path), planner=some)
    assert (loaded.missing_keys, loaded.unexpected_keys) == (["c"], ["b"])
    assert state["a"].tolist() == [0, 1] and state["c"].tolist() == [0]


def test_shapes_and_kinds_that_differ_change_nothing(tmp_path):
    save({"a": counted(2), "w": counted(2, 2)}, checkpoint_id=tmp_path)
    for other in (torch.zeros(4), 3):
        state = {"a": torch.zeros(2), "w": other}
        with pytest.raises(CheckpointException) as caught:
            load(state, checkpoint_id=tmp_path)
        assert isinstance(caught.value.failures[0][0], CheckpointMismatch)
        assert state["a"].tolist() == [0, 0]


# --------------------------------------------------------------------------------------------------
# Going back within a run: the optimizer has the state of the checkpoint, no more and no less.


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


HISTORIES = {  # steps before and after the save, and whether they use the late layer
    "late before, running not stepped": ((3, True), (0, False)),
    "late before, running without it": ((3, True), (2, False)),
    "late before and in the running": ((3, True), (2, True)),
    "late in the running only": ((3, False), (2, True)),
    "saved before the first step": ((0, False), (2, True)),
}


def _gone_back(rank: int, folder: Path, kind: str, history: str) -> None:
    (before, used_before), (after, used_after) = HISTORIES[history]
    net, optimizer = run_of(kind)
    stepped(net, optimizer, range(before), used_before)
    Checkpointer(folder).save(1, model=net, optimizer=optimizer)
    saved = held(net.state_dict()), held(optimizer.state_dict())
    stepped(net, optimizer, range(3, 5), True)
    undisturbed = held(net.state_dict()), held(optimizer.state_dict())

    net, optimizer = run_of(kind)  # a run of its own, which goes back to that checkpoint
    stepped(net, optimizer, range(7, 7 + after), used_after)
    memory = [p.to_local().data_ptr() for p in net.parameters()]  # type: ignore[attr-defined]
    assert Checkpointer(folder).load(model=net, optimizer=optimizer) == 1
    assert (held(net.state_dict()), held(optimizer.state_dict())) == saved
    assert memory == [p.to_local().data_ptr() for p in net.parameters()]  # type: ignore[attr-defined]
    stepped(net, optimizer, range(3, 5), True)
    assert (held(net.state_dict()), held(optimizer.state_dict())) == undisturbed


@pytest.mark.parametrize("history", HISTORIES)
def test_sharded_run_that_goes_back_is_as_it_was(tmp_path, history):
    run_ranks(2, _gone_back, tmp_path, "AdamW", history)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_goes_back(tmp_path, kind):
    for name in ("late before, running without it", "late in the running only"):
        run_ranks(2, _gone_back, tmp_path / name, kind, name)


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
