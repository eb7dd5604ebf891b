"""A layer of experts: each token is computed by the few of them that a router chooses.

    tokens [T, d] --router--> k experts and k scores a token
           --gather--> rows [N, d], those of one expert after those of another --experts--> [N, d]
           --times scores, added up by token--> [T, d], plus what shared experts make of all tokens

N = T * k, or less where a capacity drops rows. The layer knows of one rank. Among ranks, experts
are divided by `dure.tensor.parallel.ExpertParallel`, a style of the module `experts`.

Names and weights are those of torchtitan's MoE. Letters: T tokens, d features, h hidden features,
E experts, k experts a token.

*Balance.* Three ways, which may be used together: an auxiliary loss, which `balancing_loss` returns
(https://arxiv.org/abs/2101.03961); a bias that is added to scores where experts are chosen, and
nowhere else (https://arxiv.org/abs/2408.15664), moved by `update_expert_bias`; a capacity, beyond
which an expert's rows with the lowest scores are dropped. `tokens_per_expert` tells the load.

*Activation checkpointing* runs forward again in backward. What was counted is not counted again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from dure.comm.functional import Group, group_of
from dure.errors import UsageError
from dure.tensor.autograd import part_of
from dure.tensor.dtensor import DTensor
from dure.training import autograd_hooks

__all__ = [
    "FeedForward",
    "GroupedExperts",
    "MoE",
    "MoEArgs",
    "Routing",
    "TokenChoiceTopKRouter",
    "balancing_loss",
    "tokens_per_expert",
    "update_expert_bias",
]


@dataclass(frozen=True, kw_only=True)
class MoEArgs:
    """How a layer of experts routes and balances.

    Attributes:
        num_experts: E.
        num_shared_experts: Their hidden features together are this many times h; 0: none.
        top_k: Experts a token.
        score_func: Scores from logits: over the experts, or of each alone.
        route_norm: Divide the scores of a token's experts by their sum.
        route_scale: Multiply them by this.
        score_before_experts: Multiply what goes into experts by the scores, not what comes out.
        capacity_factor: Rows that an expert takes, over those that it would have if all had as
            many: ``ceil(capacity_factor * T * k / E)``, of this rank's tokens. None: all.
        load_balance_coeff: How far `update_expert_bias` moves a bias; None: there is none.
        aux_loss_coeff: Weight of the load-balancing loss in `balancing_loss`.
        z_loss_coeff: Weight of the mean squared logsumexp of logits there.

    Example:
        ```python
        from dure.nn import experts

        args = experts.MoEArgs(num_experts=4, top_k=2, num_shared_experts=0)
        ```
    """

    num_experts: int = 8
    num_shared_experts: int = 1
    top_k: int = 1
    score_func: Literal["softmax", "sigmoid"] = "sigmoid"
    route_norm: bool = False
    route_scale: float = 1.0
    score_before_experts: bool = True
    capacity_factor: float | None = None
    load_balance_coeff: float | None = 1e-3
    aux_loss_coeff: float = 0.0
    z_loss_coeff: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise UsageError(
                "a token has at least one expert, and at most all",
                op="MoEArgs",
                seen=f"top_k={self.top_k} of {self.num_experts}",
            )
        if self.score_func not in ("softmax", "sigmoid"):
            raise UsageError(
                "scores are softmax or sigmoid", op="MoEArgs", seen=repr(self.score_func)
            )


class FeedForward(nn.Module):
    """SwiGLU: ``w2(silu(w1 x) * w3 x)``.

    Args:
        dim: Features d.
        hidden_dim: Hidden features.

    Shapes:
        x [*, d]; result [*, d].

    Example:
        ```python
        assert experts.FeedForward(8, 16)(torch.ones(3, 8)).shape == (3, 8)
        ```
    """

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute all tokens."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class GroupedExperts(nn.Module):
    """Experts, each a SwiGLU, their weights in three tensors; as DTensors, those of a rank.

    Args:
        dim: Features d.
        hidden_dim: Hidden features h of each.
        num_experts: E.

    Shapes:
        w1, w3 [E, h, d], w2 [E, d, h]. x [N, d], rows of one expert after those of another;
        num_tokens_per_expert [E], of any dtype; result [N, d].

    Numerics:
        An expert without rows is computed as any other: its gradient is zero, and what autograd
        saves is of one kind on all ranks.

    Example:
        ```python
        grouped = experts.GroupedExperts(8, 16, num_experts=2)
        counts = torch.tensor([1, 3])  # a row for expert 0, and three for expert 1
        assert grouped(torch.ones(4, 8), counts).shape == (4, 8)
        ```
    """

    def __init__(self, dim: int, hidden_dim: int, num_experts: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights as `nn.Linear` does, from the features that go in."""
        for weight in (self.w1, self.w2, self.w3):
            bound = 1 / math.sqrt(weight.shape[-1])
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        """Compute each expert's rows."""
        gates, outs, ups = (_experts_of(w) for w in (self.w1, self.w2, self.w3))
        groups = x.split(num_tokens_per_expert.long().tolist())
        made = [
            F.linear(F.silu(F.linear(rows, gate)) * F.linear(rows, up), out)
            for rows, gate, up, out in zip(groups, gates, ups, outs, strict=True)
        ]
        return torch.cat(made)


def _experts_of(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the weights of each expert that this rank has."""
    return (part_of(weight) if isinstance(weight, DTensor) else weight).unbind()


class Routing(NamedTuple):
    """What a router decides.

    Attributes:
        top_scores: [T, k], with gradient; float32 at least.
        selected_experts: [T, k], numbers of experts.
        num_tokens_per_expert: [E], int64.
        scores: [T, E], of all experts.
        logits: [T, E].

    Obtained from:
        `TokenChoiceTopKRouter`.
    """

    top_scores: torch.Tensor
    selected_experts: torch.Tensor
    num_tokens_per_expert: torch.Tensor
    scores: torch.Tensor
    logits: torch.Tensor


class TokenChoiceTopKRouter(nn.Module):
    """Chooses the k experts with the highest scores for each token.

    Args:
        dim: Features d.
        args: Of the layer.

    Shapes:
        x [T, d]; expert_bias [E] or None.

    Example:
        ```python
        router = experts.TokenChoiceTopKRouter(8, args)  # 2 of 4 experts for each token
        routing = router(torch.ones(3, 8))
        assert routing.selected_experts.shape == (3, 2)
        assert routing.num_tokens_per_expert.sum() == 6
        ```
    """

    def __init__(self, dim: int, args: MoEArgs) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, args.num_experts, bias=False)
        self.args = args

    def forward(self, x: torch.Tensor, expert_bias: torch.Tensor | None = None) -> Routing:
        """Score the experts; the bias has a say in which are chosen, not in their scores."""
        args = self.args
        logits: torch.Tensor = self.gate(x)
        logits = logits.float() if logits.itemsize < 4 else logits
        scores = logits.sigmoid() if args.score_func == "sigmoid" else logits.softmax(-1)
        wanted = scores.detach() if expert_bias is None else scores.detach() + expert_bias
        selected = wanted.topk(args.top_k, dim=-1).indices
        top = scores.gather(1, selected)
        if args.route_norm:
            top = top / (top.sum(-1, keepdim=True) + 1e-20)
        counts = torch.bincount(selected.flatten(), minlength=args.num_experts)
        return Routing(top * args.route_scale, selected, counts, scores, logits)


class _Balance(NamedTuple):
    """Of one forward what `balancing_loss` needs."""

    counts: torch.Tensor
    score_sums: torch.Tensor
    z_sum: torch.Tensor


class MoE(nn.Module):
    """A layer of experts, in the place of a transformer's feed-forward.

    Args:
        moe_args: How it routes and balances.
        dim: Features d.
        hidden_dim: Hidden features h of each expert.

    Shapes:
        x [*, d]; result [*, d], of x's dtype, or that of shared experts' results. Any number of
        tokens, also none.

    Cost:
        Computing T * k rows; gathering them and adding them up moves 4 * T * k * d elements.

    Numerics:
        The choice of experts is not differentiated. Results do not depend on other tokens, unless
        a capacity drops some.

    Example:
        ```python
        layer = experts.MoE(args, dim=8, hidden_dim=16)
        assert layer(torch.ones(2, 5, 8)).shape == (2, 5, 8)
        ```
    """

    def __init__(self, moe_args: MoEArgs, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.args = moe_args
        self.router = TokenChoiceTopKRouter(dim, moe_args)
        self.experts = GroupedExperts(dim, hidden_dim, moe_args.num_experts)
        shared = hidden_dim * moe_args.num_shared_experts
        self.shared_experts = FeedForward(dim, shared) if shared else None
        bias = torch.zeros(moe_args.num_experts) if moe_args.load_balance_coeff else None
        self.register_buffer("expert_bias", bias)
        self.expert_bias: torch.Tensor | None
        self.load: torch.Tensor | None = None
        self.balance: _Balance | None = None

    def reset_parameters(self) -> None:
        """Forget the bias; weights are drawn by the modules that have them."""
        if self.expert_bias is not None:
            self.expert_bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute each token by its experts."""
        tokens = x.reshape(-1, x.shape[-1])
        routing: Routing = self.router(tokens, self.expert_bias)
        self._count(routing)
        order, counts = _by_expert(routing, self._capacity(len(tokens)))
        rows = order // self.args.top_k
        scores = routing.top_scores.flatten()[order].unsqueeze(1)
        routed = tokens.index_select(0, rows)
        if self.args.score_before_experts:
            made = self.experts((routed * scores).to(x.dtype), counts)
        else:
            made = self.experts(routed, counts) * scores
        shared = self.shared_experts
        result = torch.zeros_like(tokens) if shared is None else shared(tokens)
        return result.index_add(0, rows, made.to(result.dtype)).reshape(x.shape)

    def _capacity(self, tokens: int) -> int | None:
        factor, args = self.args.capacity_factor, self.args
        if factor is None:
            return None
        return max(1, math.ceil(factor * tokens * args.top_k / args.num_experts))

    def _count(self, routing: Routing) -> None:
        """Add to the load, and keep what the loss needs; not where forward is run once more."""
        args, counts, scores = self.args, routing.num_tokens_per_expert, routing.scores
        balance = None
        if self.training and (args.aux_loss_coeff or args.z_loss_coeff):
            if args.score_func == "sigmoid":
                scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
            z_sum = routing.logits.logsumexp(-1).square().sum()
            balance = _Balance(counts, scores.sum(0), z_sum)
        if self.training and not autograd_hooks.in_backward():
            self.load = counts.clone() if self.load is None else self.load + counts
            self.balance = balance


def _by_expert(routing: Routing, capacity: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which of the T * k choices are computed, sorted by expert, and how many of each [E].

    With a capacity, those of an expert are sorted by score, and the first ones stay.
    """
    chosen, counts = routing.selected_experts.flatten(), routing.num_tokens_per_expert
    if capacity is None:
        return chosen.argsort(stable=True), counts
    order = routing.top_scores.detach().flatten().argsort(descending=True, stable=True)
    order = order[chosen[order].argsort(stable=True)]
    first = counts.cumsum(0) - counts
    place = torch.arange(len(order), device=order.device) - first.repeat_interleave(counts)
    return order[place < capacity], counts.clamp(max=capacity)


# ---- over all layers of a model ------------------------------------------------------------------


def _layers(model: nn.Module) -> Iterator[tuple[str, MoE]]:
    return ((name, m) for name, m in model.named_modules() if isinstance(m, MoE))


def _summed(counts: list[torch.Tensor], group: Group) -> list[torch.Tensor]:
    """Return counts added up over the ranks of a group, with one all_reduce; None: this rank's."""
    if group is None or not counts:
        return counts
    flat = torch.cat(counts)
    group_of(group, "all_reduce").all_reduce(flat)
    return list(flat.split([len(c) for c in counts]))


def tokens_per_expert(
    model: nn.Module, group: Group = None, *, reset: bool = False
) -> dict[str, torch.Tensor]:
    """Return how many tokens chose each expert while the model was in training mode.

    Args:
        model: Has layers of experts.
        group: Over whose ranks they are added up: a group, or a mesh of one axis. None: this
            rank's own.
        reset: Begin to count anew.

    Returns:
        For each layer, by its name, [E], int64; the same on all ranks of the group. Tokens that a
        capacity drops count, too.

    Collective:
        All ranks of the group.

    Cost:
        One all_reduce of 8 bytes an expert, for all layers.

    Example:
        ```python
        from dure.nn import experts

        layer = experts.MoE(experts.MoEArgs(num_experts=4), 8, 16)
        layer(torch.ones(1, 3, 8))
        counts = experts.tokens_per_expert(layer)
        assert sum(c.sum().item() for c in counts.values()) == 3  # each token chose 1 expert
        ```
    """
    layers = dict(_layers(model))
    counts = [
        torch.zeros(m.args.num_experts, dtype=torch.int64, device=m.router.gate.weight.device)
        if m.load is None
        else m.load
        for m in layers.values()
    ]
    if reset:
        for layer in layers.values():
            layer.load = None
    return dict(zip(layers, _summed(counts, group), strict=True))


@torch.no_grad()
def update_expert_bias(model: nn.Module, group: Group = None) -> dict[str, torch.Tensor]:
    """Raise the bias of experts with fewer tokens than the mean, and lower that of those with more.

    Called once a step, before or after the optimizer's; it counts what came since the last call,
    also over several forwards.

    Args:
        model: Has layers of experts.
        group: All ranks that have other tokens: a group, or a mesh of one axis. None: this alone.

    Returns:
        The load, as `tokens_per_expert`.

    Collective, Cost:
        As `tokens_per_expert`.

    Example:
        ```python
        layer = experts.MoE(experts.MoEArgs(num_experts=4), 8, 16)
        layer(torch.ones(1, 3, 8))
        load = experts.update_expert_bias(layer)  # after the optimizer's step
        assert sum(n.sum().item() for n in load.values()) == 3
        ```
    """
    loads = tokens_per_expert(model, group, reset=True)
    for name, layer in _layers(model):
        if layer.expert_bias is not None:
            load, rate = loads[name].double(), layer.args.load_balance_coeff or 0.0
            layer.expert_bias.add_(rate * (load.mean() - load).sign())
    return loads


def balancing_loss(model: nn.Module, group: Group = None) -> torch.Tensor:
    """Return the losses that keep routers balanced, of the last forward; add it to the loss.

    Of each layer ``aux_loss_coeff * E * sum(f * p)``, f being the fraction of choices of each
    expert and p its mean score, both over the tokens of all ranks; and ``z_loss_coeff`` times the
    mean over tokens of ``logsumexp(logits) ** 2``. Layers are added up.

    Args:
        model: Has layers of experts; a forward in training mode has run.
        group: All ranks that have other tokens: a group, or a mesh of one axis. None: this rank's
            tokens are balanced among themselves.

    Returns:
        []. The mean over the group's ranks is the loss, and the mean of the gradients its gradient,
        also where ranks have different numbers of tokens, or none.

    Raises:
        UsageError: The forward was checkpointed with ``use_reentrant=True``, which leaves no graph.

    Collective:
        All ranks of the group.

    Cost:
        One all_reduce of 8 bytes an expert, for all layers.

    Example:
        ```python
        layer = experts.MoE(experts.MoEArgs(num_experts=4, aux_loss_coeff=0.01), 8, 16)
        result = layer(torch.ones(1, 3, 8))
        balance = experts.balancing_loss(layer)
        (result.sum() + balance).backward()
        assert balance.item() > 0
        ```
    """
    layers = [m for _, m in _layers(model) if m.balance is not None]
    found = [m.balance for m in layers if m.balance is not None]
    ranks = 1 if group is None else group_of(group, "balancing_loss").size()
    total = torch.zeros(())
    for layer, own, counts in zip(
        layers, found, _summed([b.counts for b in found], group), strict=True
    ):
        layer.balance = None  # its graph is the loss's from now on
        args, weight = layer.args, layer.router.gate.weight
        if torch.is_grad_enabled() and weight.requires_grad and not own.z_sum.requires_grad:
            raise UsageError(
                "the losses of a router have no gradient",
                op="balancing_loss",
                seen="a forward without gradients, as checkpoint(use_reentrant=True) runs it",
                fix="Use checkpoint(..., use_reentrant=False).",
            )
        choices = counts.sum().clamp(min=1).to(own.score_sums.dtype)
        tokens = choices / (args.top_k * ranks)
        even = args.num_experts * (counts / choices * own.score_sums).sum() / tokens
        total = total + args.aux_loss_coeff * even + args.z_loss_coeff * own.z_sum / tokens
    return total
