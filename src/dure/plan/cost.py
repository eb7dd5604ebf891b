"""The cost model: how long a step of training takes, and where the time goes.

A job is plain numbers (`Jobs`): sizes of the model, figures of the machine, a layout, and what the
software does. Each number may be a column of many jobs (numpy), so that a search costs
microseconds a layout and a fit of the constants seconds. Names of constants are those of
`data/constants.toml`, which gives unit, meaning and source of each.

**A layer's forward pass** for the ``tokens`` of one microbatch on one rank:

    products     2 m n k FLOPs each, at ``peak * gemm / (1 + gemm_side (1/m + 1/n + 1/k))``: a
                 product with short sides moves much for what it computes
    attention    4 tokens seq width / tp FLOPs; a fused kernel leaves out the masked half and has a
                 rate of its own (``flash``), otherwise the scores cross the memory
                 ``scores_passes`` times
    elementwise  norms, activations, residuals: ``passes`` over every feature, at the memory's speed
    launches     a host thread starts the kernels one by one, which takes ``host`` a layer; a layer
                 takes the longer of both, so small layers wait for the host
    tp           4 collectives of tokens * width a layer; nothing hides them but software that
                 overlaps them

Its backward pass takes twice the products, 2.5 times the attention (five products for two), and
twice the rest. A layer that is recomputed pays most of a forward pass again (``recompute``). The
ends of the model add the product with the vocabulary and the loss (``loss_passes`` over the scores
in float32).

**A step** of n microbatches over pp stages in v parts takes n times the slowest stage; the rest of
the pipeline, filled and drained once, is the bubble: ``(sum of the stages - slowest) / v``. Each
microbatch waits for its messages between stages. Then come the reduction of gradients along dp,
which the measured programs hardly hide, or the gathers of sharded parameters beyond what
computing hides; and the optimizer.

**A collective** of b bytes over n ranks, l of them in each node, moves ``b (l - 1) / l`` through
the links of a node and ``b (n/l - 1) / (n/l)`` through the network, whose cards a node's l ranks
share; all-reduce is two of them. Latency grows with log2 of l, and with a power of the nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dure.plan.constants import Constants

__all__ = ["Column", "Jobs", "choose", "least", "most", "step_time"]

Column = Any  # a number, or a numpy array with a number for each job

_MAXIMUM_POWER = 4.0  # of the smooth maximum: the larger of 1 and 1 gives 1.19


class Jobs:
    """A job, or many: numbers and columns, as attributes; flags are 0 or 1.

    Attributes:
        layers, width, hidden, kv_width, heads, vocab, seq: Sizes of the model, of a sequence.
        gated: Whether the MLP has a gate (SwiGLU): three matrices.
        tied: Whether the scores use the embedding's weights.
        peak: FLOP/s of a rank in the precision of the products.
        hbm, link, net: Bytes/s of a rank: memory; to its node; its share to others.
        node_size: Ranks of a node.
        is_h100: Hopper or newer.
        efa: Whether the network is AWS's.
        power: Power limit over the usual.
        dp, tp, cp, pp: Ranks along each axis.
        zero: 0 replicas, 1 optimizer sharded, 2 gradients too, 3 parameters too (FSDP).
        shard: Over how many ranks, where zero is 2 or 3.
        sp: Whether tp comes with sequence parallelism.
        parts: Stages a rank, of an interleaved schedule.
        microbatch: Sequences of a microbatch, for each of the dp * cp ranks' groups.
        microbatches: In a step.
        recompute: Share of the layers that are recomputed.
        selective: Whether only cheap operators of each layer are.
        param_bytes: Of the parameters that are computed with; master_bytes: of their float32 copy.
        grad_bytes: Of a gradient, when reduced.
        fp8: Whether products are in 8 bits; fused: attention in one kernel; newest: the vendor's.
        compiled: Whether elementwise operators are fused.
        overlapped: Whether tp's collectives and messages are overlapped with computing.
        balanced: Whether stages are cut by cost, ends included, and not by layers.
        regathers: Whether what tp gathers is gathered again for the backward pass.
        split: Whether messages are split over tp.
        bucketed: Whether gradients of replicas are reduced in buckets during the backward pass.
        once: Whether FSDP's gradients are added up unsharded, and reduced after the last
            microbatch.
        shared: Whether ranks that share parameters have them unsharded in the memory of one host.
    """

    def __init__(self, values: Mapping[str, Column]) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Column:
        raise AttributeError(name)

    @staticmethod
    def of(rows: Sequence[Mapping[str, float]]) -> Jobs:
        """Return the columns of some rows, each with all the names above."""
        return Jobs({name: np.array([float(row[name]) for row in rows]) for name in rows[0]})

    @property
    def tokens(self) -> Column:
        """Of a microbatch, on one rank."""
        return self.microbatch * self.seq / self.cp

    @property
    def replicas(self) -> Column:
        """Ranks that have the same part of the model."""
        return self.dp * self.cp

    @property
    def layer_parameters(self) -> Column:
        """Of one layer, matrices only."""
        attention = 2 * self.width * (self.width + self.kv_width)
        return attention + (2 + self.gated) * self.width * self.hidden

    @property
    def stages(self) -> tuple[Column, Column]:
        """Layers of the first and of the last rank of a pipeline.

        Where stages are cut by cost, the scores count as the layers that they have the size of:
        each rank takes its share, rounded up, and the last what is left; or all but the last take
        it rounded down, if that leaves the last one not more.
        """
        pp, layers = self.pp, self.layers
        scores = self.vocab * self.width / self.layer_parameters
        share = (layers + scores) / pp
        below, above = share // 1, _rounded_up(share)
        less = layers - (pp - 1) * below
        down = less + scores <= above
        first = least(choose(down, below, above), layers)
        last = choose(down, less, most(layers - _rounded_up((pp - 1) * share), 0.0))
        equal = _rounded_up(layers / (pp * self.parts)) * self.parts
        by_cost = (self.balanced > 0) & (pp > 1)
        return choose(by_cost, first, equal), choose(by_cost, last, equal)

    def held(self, layers: Column) -> Column:
        """Parameters of a rank with some layers and an end, or with both: a tp-th of them."""
        ends = choose(self.pp > 1, 1.0, 2.0 - self.tied) * self.vocab * self.width
        return (layers * self.layer_parameters + ends) / self.tp


def choose(flag: Column, yes: Column, no: Column) -> Column:
    """Return the one or the other, as a flag says."""
    return no + (yes - no) * flag


def least(a: Column, b: Column) -> Column:
    """Return the smaller."""
    return choose(a < b, a, b)


def most(a: Column, b: Column) -> Column:
    """Return the larger."""
    return choose(a > b, a, b)


def _rounded_up(a: Column) -> Column:
    return -(-a // 1)


def step_time(jobs: Jobs, c: Constants) -> dict[str, Column]:
    """Return the seconds of a step by what they are spent on (`data/terms.toml`).

    Cost:
        Some hundred microseconds, and a microsecond for each job of the columns.
    """
    layer = _layer(jobs, c)
    n, per_rank = jobs.microbatches, jobs.layers / jobs.pp
    ends, message = _ends(jobs, c), _message(jobs, c)
    each = sum(layer.values())
    first, last = jobs.stages
    stage = most(first * each, last * each + ends)
    others = most(jobs.layers * each + ends - stage, 0) + (jobs.pp - 1) * message
    own = jobs.held(first)
    return {name: seconds * per_rank * n for name, seconds in layer.items()} | {
        "ends": (stage - per_rank * each) * n,
        "messages": message * n,
        "bubble": others / jobs.parts,
        "dp": _data_parallel(jobs, c, own, stage),
        "optimizer": _optimizer(jobs, c, own),
    }


# --- one layer, one microbatch, forward and backward ---------------------------------------------


def _layer(jobs: Jobs, c: Constants) -> dict[str, Column]:
    """Return the seconds of one layer for one microbatch, forward, backward and again."""
    products, elementwise = _products(jobs, c), _elementwise(jobs, c)
    attention, tp = _attention(jobs, c), _tensor_parallel(jobs, c)
    again = jobs.recompute * c.recompute
    # With fused attention every second product is computed again, and what is elementwise.
    selective = jobs.selective * jobs.fused
    forward = products + attention + elementwise
    backward = 2 * products + 2.5 * attention + 2 * elementwise
    host = _host(jobs, c)
    waits = _larger(forward, host) - forward
    waits_backward = _larger(backward, c.host_backward * host) - backward
    return {
        "products": products * (3 + again + selective / 2),
        "attention": attention * (3.5 + again + jobs.selective - selective),
        "elementwise": elementwise * (3 + again + selective),
        "launches": waits * (1 + again) + waits_backward,
        "tp": tp * (2 + again),
        "cp": _context_parallel(jobs, c, attention) * (3 + again),
    }


def _rate(jobs: Jobs, c: Constants) -> Column:
    """FLOP/s of a large matrix product."""
    return jobs.peak * choose(jobs.is_h100, c.gemm_h100, c.gemm_a100) * jobs.power**c.power


def _product(jobs: Jobs, c: Constants, m: Column, n: Column, k: Column) -> Column:
    return 2 * (m * n * k + c.gemm_side * (m * n + n * k + k * m)) / _rate(jobs, c)


def _products(jobs: Jobs, c: Constants) -> Column:
    tokens, width, tp = jobs.tokens, jobs.width, jobs.tp
    up = jobs.hidden * (1 + jobs.gated)
    return (
        _product(jobs, c, tokens, (width + 2 * jobs.kv_width) / tp, width)
        + _product(jobs, c, tokens, width, width / tp)
        + _product(jobs, c, tokens, up / tp, width)
        + _product(jobs, c, tokens, width, jobs.hidden / tp)
    )


def _attention(jobs: Jobs, c: Constants) -> Column:
    flops = 4 * jobs.tokens * jobs.seq * jobs.width / jobs.tp
    flash = choose(jobs.is_h100, c.flash_h100, c.flash_a100)
    flash = flash * choose(jobs.newest, c.flash_newest, 1.0)
    bf16 = jobs.peak / (1 + jobs.fp8) * jobs.power**c.power
    scores = 2 * jobs.heads / jobs.tp * jobs.tokens * jobs.seq
    plain = flops / _rate(jobs, c) + c.scores_passes * scores / jobs.hbm
    return choose(jobs.fused, flops / 2 / (bf16 * flash), plain)


def _elementwise(jobs: Jobs, c: Constants) -> Column:
    tp, width = jobs.tp, jobs.width
    up = jobs.hidden * (1 + jobs.gated)
    features = width / choose(jobs.sp, tp, 1.0) + (up + width + 2 * jobs.kv_width) / tp
    passes = c.passes * choose(jobs.compiled, c.compiled, 1.0) * features
    casts = jobs.fp8 * c.fp8_casts * (3 * width + up) / tp
    return jobs.param_bytes * jobs.tokens * (passes + casts) / jobs.hbm


def _host(jobs: Jobs, c: Constants) -> Column:
    """Seconds that a host takes to start the kernels of a layer's forward pass."""
    base = c.host * choose(jobs.is_h100, c.host_h100, 1.0)
    base = base * choose(jobs.compiled, c.host_compiled, 1.0)
    # Over AWS's network, messages between stages hold up every collective of tensor parallelism.
    ranks = jobs.replicas * jobs.tp * jobs.pp
    held = (jobs.efa > 0) & (jobs.pp > 1) & (jobs.tp > 1) & (ranks > jobs.node_size)
    return base + held * c.efa_tp * jobs.tp


def _tensor_parallel(jobs: Jobs, c: Constants) -> Column:
    """Seconds of a forward pass: two all-reduces, or as many bytes gathered and scattered."""
    nbytes = jobs.param_bytes * jobs.tokens * jobs.width
    latency, each = _collective(jobs, c, jobs.tp, jobs.tp)
    return 4 * (latency + each * nbytes) * choose(jobs.overlapped, c.overlapped, 1.0)


def _context_parallel(jobs: Jobs, c: Constants, attention: Column) -> Column:
    """Seconds of a ring of keys and values that attention does not hide, and of adding up parts.

    Each of the cp - 1 steps has a message, and reads and writes the output once to add its part.
    """
    steps = jobs.cp - 1
    nbytes = 2 * jobs.param_bytes * jobs.tokens * jobs.kv_width / jobs.tp
    near = jobs.tp * jobs.cp <= jobs.node_size
    bandwidth = choose(near, jobs.link * c.link, jobs.net * c.net)
    output = jobs.param_bytes * jobs.tokens * jobs.width / jobs.tp
    added = 3 * output / jobs.hbm  # both read, their sum written
    return _exposed(steps * nbytes / bandwidth, attention) + steps * (added + c.message)


# --- the ends, the pipeline -----------------------------------------------------------------------


def _ends(jobs: Jobs, c: Constants) -> Column:
    """Seconds of the model's ends for one microbatch, forward and backward.

    Scores and loss; embedding and loss have the kernels of two layers, and wait for the host.
    """
    scores = jobs.vocab / jobs.tp
    loss = c.loss_passes * 4 * jobs.tokens * scores / jobs.hbm
    return 3 * _product(jobs, c, jobs.tokens, scores, jobs.width) + loss + 2 * _host(jobs, c)


def _message(jobs: Jobs, c: Constants) -> Column:
    """Seconds that a microbatch waits for its messages, there and back."""
    nbytes = jobs.param_bytes * jobs.tokens * jobs.width / choose(jobs.split, jobs.tp, 1.0)
    far = jobs.tp * jobs.replicas >= jobs.node_size
    bandwidth = choose(far, jobs.net * c.net, jobs.link * c.link)
    seconds = 2 * (c.message + c.message_bytes * nbytes / bandwidth) * jobs.parts
    return (jobs.pp > 1) * seconds * choose(jobs.overlapped, c.overlapped, 1.0)


# --- what follows the last microbatch -------------------------------------------------------------


def _data_parallel(jobs: Jobs, c: Constants, own: Column, stage: Column) -> Column:
    """Seconds of gradients and sharded parameters that do not hide behind computing."""
    gradients, weights = own * jobs.grad_bytes, own * jobs.param_bytes
    n, shard = jobs.replicas, jobs.shard
    near = least(most(jobs.node_size / jobs.tp, 1.0), n)  # tp's ranks come first
    latency, each = _collective(jobs, c, n, near)
    scatter, gather = latency + each * gradients, latency + each * weights
    backward = stage * 2 / 3 * jobs.bucketed
    replicated = choose(
        jobs.zero == 1, scatter + gather, _exposed(2 * scatter, c.overlap * backward)
    )
    # Hybrid: the shards' gradients are reduced over the groups of ranks that shard.
    latency, each = _collective(jobs, c, n / shard, near / shard)
    over = 2 * (latency + each * gradients / shard)
    latency, each = _collective(jobs, c, shard, near)
    starts = latency * jobs.layers / jobs.pp  # layer by layer
    gather = (starts + each * weights) * choose(jobs.zero == 3, 2, 1) * (1 - jobs.shared)
    scatter = (starts + each * gradients) / choose(jobs.once, jobs.microbatches, 1.0)
    moved = gather + scatter  # for every microbatch
    sharded = jobs.microbatches * (_exposed(moved, stage) + c.interference * moved)
    return choose(jobs.zero >= 2, sharded + over, replicated)


def _optimizer(jobs: Jobs, c: Constants, own: Column) -> Column:
    """Seconds of AdamW: gradient, two moments, weights read; all but the gradient written."""
    parts = choose(jobs.zero >= 2, jobs.shard, choose(jobs.zero == 1, jobs.replicas, 1.0))
    read = choose(jobs.master_bytes > 0, jobs.master_bytes, jobs.param_bytes)
    copied = (jobs.master_bytes > 0) * jobs.param_bytes
    nbytes = jobs.grad_bytes + 2 * (8 + read) + copied
    return c.adam * nbytes * own / parts / jobs.hbm


# --- communication --------------------------------------------------------------------------------


def _collective(jobs: Jobs, c: Constants, n: Column, near: Column) -> tuple[Column, Column]:
    """Return the seconds of an empty gather or scatter, and of each byte of the full tensor.

    An all-reduce is two of them (see the top of this file).

    Args:
        jobs: Their machines.
        c: Constants.
        n: Ranks.
        near: How many of them share a node, if there are as many.
    """
    near = least(most(near, 1.0), least(n, jobs.node_size))
    nodes, doublings = n / near, np.log2(near)
    to_others = choose(jobs.efa, c.efa_latency, c.net_latency) * (1 + doublings)
    latency = c.link_latency * doublings + to_others * (nodes - 1) ** c.net_growth
    within, over = (near - 1) / near / (jobs.link * c.link), (nodes - 1) / nodes / jobs.net
    return latency, within + over / (near * c.net)


def _larger(a: Column, b: Column) -> Column:
    """Return a smooth maximum."""
    p = _MAXIMUM_POWER
    return (a**p + b**p) ** (1 / p)


def _exposed(communication: Column, cover: Column) -> Column:
    """Return what of the communication is not hidden behind computing of some length."""
    return _larger(communication, cover) - cover
