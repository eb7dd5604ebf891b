"""Layers of experts: routing, capacity, balancing and precision, against values by hand."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close as close
from torch.utils.checkpoint import checkpoint

from dure.errors import UsageError
from dure.nn.experts import (
    MoEArgs,
    TokenChoiceTopKRouter,
    balancing_loss,
    tokens_per_expert,
    update_expert_bias,
)
from tests.nn.expert_models import BALANCED, D, drawn, layer


@pytest.mark.parametrize("func", ["softmax", "sigmoid"])
def test_a_router_chooses_by_scores_and_a_bias_changes_only_the_choice(func: Any) -> None:
    def route(bias: list[float] | None, **more: Any) -> Any:
        router = TokenChoiceTopKRouter(3, MoEArgs(num_experts=3, score_func=func, top_k=2, **more))
        router.gate.weight.data = torch.eye(3)
        given = None if bias is None else torch.tensor(bias)
        return router(torch.tensor([[0.0, 1.0, 2.0]]), given)

    raw = [1 / (1 + math.exp(-v)) for v in range(3)]
    if func == "softmax":
        raw = [math.exp(v) / (1 + math.e + math.e**2) for v in range(3)]
    plain = route(None)
    assert plain.selected_experts.tolist() == [[2, 1]]
    assert plain.num_tokens_per_expert.tolist() == [0, 1, 1]
    close(plain.top_scores, torch.tensor([[raw[2], raw[1]]]))
    biased = route([5.0, 0.0, 0.0])
    assert biased.selected_experts.tolist() == [[0, 2]]
    close(biased.top_scores, torch.tensor([[raw[0], raw[2]]]))
    normed = route(None, route_norm=True, route_scale=3.0)
    sum_ = raw[2] + raw[1]
    close(normed.top_scores, torch.tensor([[3 * raw[2] / sum_, 3 * raw[1] / sum_]]))


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("shared", [0, 2])
def test_a_token_is_the_sum_of_its_experts(before: bool, shared: int) -> None:
    moe = layer(num_shared_experts=shared, score_before_experts=before)
    x = drawn(2, 5, D).requires_grad_()
    got = moe(x)
    got.square().sum().backward()
    grads = [x.grad, *(p.grad for p in moe.parameters())]
    x.grad = None
    moe.zero_grad()

    rows = []
    for token in x.reshape(-1, D):
        scores = (moe.router.gate.weight @ token).sigmoid()
        row = torch.zeros(D, dtype=torch.float64)
        if moe.shared_experts is not None:
            row = moe.shared_experts(token)
        for e in scores.argsort(descending=True)[:2].tolist():
            w1, w2, w3 = (w[e] for w in (moe.experts.w1, moe.experts.w2, moe.experts.w3))
            into = token * scores[e] if before else token
            made = w2 @ (F.silu(w1 @ into) * (w3 @ into))
            row = row + (made if before else made * scores[e])
        rows.append(row)
    wanted = torch.stack(rows).reshape(x.shape)
    close(got, wanted)
    wanted.square().sum().backward()
    for mine, parameter in zip(grads, [x, *moe.parameters()], strict=True):
        close(mine, parameter.grad)


def test_a_capacity_keeps_the_highest_scores() -> None:
    """Four tokens want expert 0 of 2, whose capacity is 1.0 * 4 * 1 / 2: two stay."""
    moe = layer(num_experts=2, top_k=1, num_shared_experts=0, capacity_factor=1.0)
    with torch.no_grad():
        moe.router.gate.weight.zero_()[0, 0] = 1.0
    x = drawn(4, D)
    x[:, 0] = torch.tensor([1.0, 4.0, 2.0, 3.0])
    got = moe(x)
    unlimited = copy.deepcopy(moe)
    unlimited.args = MoEArgs(num_experts=2, top_k=1, num_shared_experts=0)
    wanted = unlimited(x)
    assert got[[0, 2]].tolist() == torch.zeros(2, D).tolist()
    close(got[[1, 3]], wanted[[1, 3]])
    assert tokens_per_expert(moe)[""].tolist() == [4, 0]  # what was wanted, not what was computed


def test_a_bias_moves_against_the_load_and_a_loss_is_one_where_the_load_is_even() -> None:
    moe = layer(top_k=1, aux_loss_coeff=2.0, load_balance_coeff=0.5)
    with torch.no_grad():
        moe.router.gate.weight.zero_()[:4, :4] = 50 * torch.eye(4)
    moe(torch.eye(D).double()[:4])
    close(balancing_loss(moe), torch.tensor(2.0, dtype=torch.float64), rtol=1e-2, atol=0)
    moe(torch.eye(D).double()[[0, 0, 0, 1]])
    # Fractions and mean scores are (3/4, 1/4, 0, 0), or nearly: 2 * 4 * (9/16 + 1/16).
    skewed = balancing_loss(moe)
    scores = torch.full((4, 4), 0.5, dtype=torch.float64)
    scores[[0, 1, 2, 3], [0, 0, 0, 1]] = 1.0
    mean = (scores / scores.sum(1, keepdim=True)).mean(0)
    close(skewed, 2 * 4 * (0.75 * mean[0] + 0.25 * mean[1]))
    moe.eval()(torch.eye(D).double()[:1])  # is not counted
    loads = update_expert_bias(moe)
    assert loads[""].tolist() == [4, 2, 1, 1]
    assert moe.expert_bias.tolist() == [-0.5, 0.0, 0.5, 0.5]
    assert tokens_per_expert(moe)[""].tolist() == [0] * 4


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_tokens_count_once(reentrant: bool) -> None:
    moe, x = layer(**BALANCED), drawn(7, D).requires_grad_()
    out = checkpoint(moe, x, use_reentrant=reentrant)
    if reentrant:
        with pytest.raises(UsageError):
            balancing_loss(moe)
        out.sum().backward()
    else:
        (out.sum() + balancing_loss(moe)).backward()
        again = layer(**BALANCED)
        (again(x).sum() + balancing_loss(again)).backward()
        close(moe.router.gate.weight.grad, again.router.gate.weight.grad)
    assert tokens_per_expert(moe)[""].sum() == 7 * 2
    assert moe.balance is None


@pytest.mark.parametrize("wrong", [{"top_k": 9}, {"score_func": "relu"}])
def test_invalid_arguments_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        MoEArgs(**wrong)
