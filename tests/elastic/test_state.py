"""The state of a run on one rank: attributes, commits and the way back."""

import pytest
import torch
from torch import nn

from dure.data import DataLoader
from dure.elastic import State
from dure.elastic.views import Progress
from dure.errors import PeerLost, UsageError
from dure.parallel.amp import GradScaler


def test_attributes_are_parts_or_values():
    model = nn.Linear(2, 1)
    state = State(model=model, epoch=3)
    state.best = [1.0, (2, "x")]
    assert state.model is model and state.epoch == 3 and state.part_names == {"model"}
    del state.best
    with pytest.raises(AttributeError):
        _ = state.best
    with pytest.raises(AttributeError):
        del state.best


def test_restore_is_the_way_back_to_the_last_commit():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    state = State(model=model, optimizer=optimizer, epoch=0, total=torch.zeros(3))
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    state.epoch, state.total = 1, state.total + 1
    assert state.commit() and state.commits == 1
    kept = model.weight.detach().clone()
    moment = optimizer.state[model.weight]["exp_avg"].clone()
    numbers = torch.rand(3)
    optimizer.step()
    state.epoch, state.total = 2, state.total + 1
    state.restore()
    assert torch.equal(model.weight, kept) and model.weight.grad is None
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], moment)
    assert state.epoch == 1 and state.total.tolist() == [1, 1, 1]
    assert torch.equal(torch.rand(3), numbers)


class Step:
    """A model with a scaler, and optimizers of which one has no gradients."""

    def __init__(self, kind: type[torch.amp.GradScaler]) -> None:
        self.model = nn.Linear(2, 1)
        scaler = kind("cpu", init_scale=4.0)  # pyright: ignore[reportArgumentType]
        optimizers = [torch.optim.SGD(self.model.parameters(), 0.1) for _ in range(2)]
        self.state = State(
            model=self.model, scaler=scaler, first=optimizers[0], second=optimizers[1]
        )

    def backward(self, x: float) -> None:
        self.state.scaler.scale(self.model(torch.full((1, 2), x)).sum()).backward()


SCALERS = [torch.amp.GradScaler, GradScaler]


@pytest.mark.parametrize("kind", SCALERS)
def test_restore_after_unscale_lets_the_next_step_unscale(kind: type[torch.amp.GradScaler]):
    """As after a loss that became NaN."""
    step = Step(kind)
    state = step.state
    state.commit()
    step.backward(float("nan"))
    state.scaler.unscale_(state.first)
    state.restore()
    step.backward(1.0)
    state.scaler.unscale_(state.first)
    assert step.model.weight.grad.tolist() == [[1.0, 1.0]]
    state.scaler.step(state.first)
    state.scaler.update()
    assert state.scaler.get_scale() == 4.0


@pytest.mark.parametrize("kind", SCALERS)
def test_restore_brings_back_the_stages_of_a_commit_within_a_step(
    kind: type[torch.amp.GradScaler],
):
    step = Step(kind)
    state = step.state
    step.backward(float("inf"))
    state.scaler.unscale_(state.first)
    state.commit()
    state.scaler.step(state.first)
    state.scaler.update()  # all optimizers are before `unscale_` again, with another scale
    state.restore()
    with pytest.raises(RuntimeError):
        state.scaler.unscale_(state.first)
    state.scaler.update()  # of the gradients that were not finite
    assert state.scaler.get_scale() == 2.0


def test_every_commits_now_and_then():
    state = State(n=0)
    assert [state.commit(every=3) for _ in range(7)] == [False, False, True] * 2 + [False]
    assert state.commits == 2


@pytest.mark.parametrize(("stands", "n"), [(1, 1), (0, 0)])
def test_a_staged_step_becomes_the_committed_one_if_it_stands(stands: int, n: int):
    def lost(step: int) -> None:
        raise PeerLost("while all agree")

    state = State(n=0)
    state.begin()
    state.attach(lost)
    state.n = 1
    with pytest.raises(PeerLost):
        state.commit()
    assert state.standing() == Progress(committed=0, staged=1)
    state.settle(stands)
    state.n = 2
    state.restore()
    assert (state.commits, state.n) == (stands, n)
    assert state.standing() == Progress(committed=stands)


def test_a_part_takes_over_what_was_committed_under_its_name():
    state = State()
    state.loader = DataLoader(range(10), 2)
    for step, _ in enumerate(state.loader):
        if step == 1:
            break
    state.commit()
    state.loader = DataLoader(range(10), 2)
    assert [batch.tolist() for batch in state.loader] == [[4, 5], [6, 7], [8, 9]]


def test_nothing_to_go_back_to_is_an_error():
    with pytest.raises(UsageError):
        State().restore()
