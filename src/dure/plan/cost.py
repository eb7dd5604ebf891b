"""The cost model: how long a step of training takes, and where the time goes.

A job is a row of plain numbers (`Jobs`): sizes of the model, figures of the machine, a layout, and
what the software does. The formulas work on whole columns at once (numpy), so that a search costs
microseconds a layout and a fit of the constants seconds. Names of constants are those of
`data/constants.toml`, which gives unit, meaning and source of each.

**A layer's forward pass** for the ``tokens`` of one microbatch on one rank:

    products     2 m n k FLOPs each, at ``peak * gemm / (1 + gemm_area / (m n))``: a product with a
                 small result leaves units idle
    attention    4 tokens seq width / tp FLOPs; a fused kernel leaves out the masked half and has a
                 rate of its own (``flash``), otherwise the scores cross the memory
                 ``scores_passes`` times
    elementwise  norms, activations, residuals: ``passes`` over every feature, at the memory's speed
    launches     a host thread starts the kernels one by one, which takes ``host`` a layer; a layer
                 takes the longer of both, so small layers wait for the host
    tp           4 collectives of tokens * width a layer; nothing hides them but software that
                 overlaps them

Its backward pass takes twice the products, 2.5 times the attention, and twice the rest. A layer
that is recomputed pays most of a forward pass again (``recompute``). The ends of the model add the
product with the vocabulary and the loss (``loss_passes`` over the scores in float32).

**A step** of n microbatches over pp stages in v parts takes n times the slowest stage; the rest of
the pipeline, filled and drained once, is the bubble: ``(sum of the stages - slowest) / v``. Each
microbatch waits for its messages between stages. Then comes what cannot hide behind computing: the
reduction of gradients along dp, or the gathers of sharded parameters, and the optimizer. Where
memory is nearly full (``room``), every microbatch waits for the allocator (``refill``).

**A collective** of b bytes over n ranks, l of them in each node, moves ``b (l - 1) / l`` through
the links of a node and ``b (n/l - 1) / (n/l)`` through the network, whose cards a node's l ranks
share; all-reduce moves twice as much. Latency grows with log2 of l, and with a power of the nodes.

Numbers in the formulas themselves are reckoned, not fitted: 0.85 of a memory's speed, 30 bytes of
an update, 2.5 times the attention backward, 0.3 of q, k and v turned and copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from dure.plan.constants import Constants

__all__ = ["Jobs", "Time", "step_time"]

Column = Any  # a numpy array with a number for each job

_MAXIMUM_POWER = 4.0  # of the smooth maximum: the larger of 1 and 1 gives 1.19
_EDGE = 0.01  # of a memory: how sharp the edge is behind which it is nearly full


@dataclass(slots=True)
class Jobs:
    """Jobs, a number for each in every column; flags are 0 or 1.

    Attributes:
        layers, width, hidden, kv_width, heads, vocab, seq: Sizes of the model, of a sequence.
        gated: Whether the MLP has a gate (SwiGLU): three matrices.
        tied: Whether the scores use the embedding's weights.
        peak: FLOP/s of a rank in the precision of the products.
        memory: Bytes of a rank's memory.
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
        fp8: Whether products are in 8 bits; fused: attention in one kernel, 2: the vendor's newest.
        compiled: Whether elementwise operators are fused.
        overlapped: Whether tp's collectives and messages are overlapped with computing.
        balanced: Whether stages are cut by cost, ends included, and not by layers.
        blocking: Whether messages between stages wait for one another.
        split: Whether messages are split over tp.
        once: Whether FSDP's gradients are added up whole, and reduced behind the last microbatch.
        shared: Whether ranks that share parameters have them in the memory of one host, whole.
    """

    layers: Column
    width: Column
    hidden: Column
    kv_width: Column
    heads: Column
    vocab: Column
    seq: Column
    gated: Column
    tied: Column
    peak: Column
    memory: Column
    hbm: Column
    link: Column
    net: Column
    node_size: Column
    is_h100: Column
    efa: Column
    power: Column
    dp: Column
    tp: Column
    cp: Column
    pp: Column
    zero: Column
    shard: Column
    sp: Column
    parts: Column
    microbatch: Column
    microbatches: Column
    recompute: Column
    selective: Column
    param_bytes: Column
    master_bytes: Column
    grad_bytes: Column
    fp8: Column
    fused: Column
    compiled: Column
    overlapped: Column
    balanced: Column
    blocking: Column
    split: Column
    once: Column
    shared: Column

    @staticmethod
    def of(rows: Sequence[Mapping[str, float]]) -> Jobs:
        """Return the columns of some rows, each with all the names above."""
        names = [field.name for field in fields(Jobs)]
        return Jobs(**{name: np.array([float(row[name]) for row in rows]) for name in names})

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def tokens(self) -> Column:
        """Of a microbatch, on one rank."""
        return self.microbatch * self.seq / self.cp

    @property
    def ranks(self) -> Column:
        """Of the whole job."""
        return self.dp * self.tp * self.cp * self.pp

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
        less = layers - (pp - 1) * np.floor(share)
        down = less + scores <= np.ceil(share)
        first = np.minimum(np.where(down, np.floor(share), np.ceil(share)), layers)
        last = np.where(down, less, np.maximum(layers - np.ceil((pp - 1) * share), 0.0))
        alike = np.ceil(layers / (pp * self.parts)) * self.parts
        by_cost = (self.balanced > 0) & (pp > 1)
        return np.where(by_cost, first, alike), np.where(by_cost, last, alike)

    def held(self, layers: Column) -> Column:
        """Parameters of a rank with some layers and an end, or with both: a tp-th of them."""
        ends = np.where(self.pp > 1, 1.0, 2.0 - self.tied) * self.vocab * self.width
        return (layers * self.layer_parameters + ends) / self.tp

    @property
    def parameters(self) -> Column:
        """Of the first rank's matrices."""
        return self.held(self.stages[0])


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds of a step, by what they are spent on; together they are the step.

    Attributes:
        products: Matrix products of the layers, recomputed ones included.
        attention: Scores, and what follows them.
        elementwise: Norms, activations, adding up gradients: bounded by the memory.
        ends: Scores over the vocabulary, loss; the slowest stage's excess over the others.
        launches: The device waits for the host.
        tp: Exposed communication of tensor parallelism.
        cp: Of context parallelism.
        messages: Between stages.
        bubble: The pipeline fills and drains.
        dp: Exposed communication of data parallelism: gradients, sharded parameters.
        optimizer: The update.
        allocator: Memory is nearly full: what is free is in the wrong places, and has to be given
            back and asked for again.
    """

    products: Column
    attention: Column
    elementwise: Column
    ends: Column
    launches: Column
    tp: Column
    cp: Column
    messages: Column
    bubble: Column
    dp: Column
    optimizer: Column
    allocator: Column

    @property
    def total(self) -> Column:
        """The step."""
        return sum(getattr(self, field.name) for field in fields(self))


def step_time(jobs: Jobs, c: Constants, held: Column) -> Time:
    """Return where the time of a step goes, for each job.

    Args:
        jobs: They.
        c: Constants.
        held: Bytes that the fullest rank of each holds (`peak_memory`).
    """
    layer = _layer(jobs, c)
    head = _head(jobs, c)
    n, per_rank = jobs.microbatches, jobs.layers / jobs.pp
    each = sum(layer.values())
    first, last = jobs.stages
    stage = np.maximum(first * each, last * each + head)
    added, message = _added_up(jobs, c), _message(jobs, c)
    others = np.maximum(jobs.layers * each + head - stage, 0)
    others = others + (jobs.pp - 1) * (added + message)
    runs = per_rank * n
    return Time(
        products=layer["products"] * runs,
        attention=layer["attention"] * runs,
        elementwise=layer["elementwise"] * runs + added * n,
        ends=(stage - per_rank * each) * n,
        launches=layer["launches"] * runs,
        tp=layer["tp"] * runs,
        cp=layer["cp"] * runs,
        messages=message * n,
        bubble=others / jobs.parts,
        dp=_data_parallel(jobs, c, stage),
        optimizer=_optimizer(jobs, c),
        allocator=_allocator(jobs, c, held),
    )


# --- one layer, one microbatch, forward and backward ---------------------------------------------


def _layer(jobs: Jobs, c: Constants) -> dict[str, Column]:
    """Return the seconds of one layer for one microbatch, forward, backward and again."""
    fused = jobs.fused > 0
    products, elementwise = _products(jobs, c), _elementwise(jobs, c)
    attention, tp = _attention(jobs, c), _tensor_parallel(jobs, c)
    again = jobs.recompute * c.recompute
    again_products = again + np.where(fused, 0.5, 0.0) * jobs.selective
    again_attention = again + np.where(fused, 0.0, 1.0) * jobs.selective
    again_elementwise = again + np.where(fused, 1.0, 0.0) * jobs.selective
    forward = products + attention + elementwise
    backward = 2 * products + 2.5 * attention + 2 * elementwise
    host = _host(jobs, c)
    waits = _larger(forward, host) - forward
    waits_backward = _larger(backward, c.host_backward * host) - backward
    return {
        "products": products * (3 + again_products),
        "attention": attention * (3.5 + again_attention),
        "elementwise": elementwise * (3 + again_elementwise),
        "launches": waits * (1 + again) + waits_backward,
        "tp": tp * (2 + again),
        "cp": _context_parallel(jobs, c, attention) * (3 + again),
    }


def _rate(jobs: Jobs, c: Constants) -> Column:
    """FLOP/s of a large matrix product."""
    return jobs.peak * np.where(jobs.is_h100 > 0, c.gemm_h100, c.gemm_a100) * jobs.power**c.power


def _memory_rate(jobs: Jobs) -> Column:
    """Bytes/s of operators that only read and write."""
    return jobs.hbm * 0.85


def _product(jobs: Jobs, c: Constants, m: Column, n: Column, k: Column) -> Column:
    return 2 * m * n * k / _rate(jobs, c) * (1 + c.gemm_area / (m * n))


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
    flash = np.where(jobs.is_h100 > 0, c.flash_h100, c.flash_a100)
    flash = flash * np.where(jobs.fused > 1, c.flash_newest, 1.0)
    bf16 = jobs.peak / np.where(jobs.fp8 > 0, 2.0, 1.0) * jobs.power**c.power
    fused = flops / 2 / (bf16 * flash)
    scores = 2 * jobs.heads / jobs.tp * jobs.tokens * jobs.seq
    plain = flops / _rate(jobs, c) + c.scores_passes * scores / _memory_rate(jobs)
    return np.where(jobs.fused > 0, fused, plain)


def _elementwise(jobs: Jobs, c: Constants) -> Column:
    tp, width = jobs.tp, jobs.width
    up = jobs.hidden * (1 + jobs.gated)
    along_width = width / np.where(jobs.sp > 0, tp, 1.0)
    features = along_width + (up + 0.3 * (width + 2 * jobs.kv_width)) / tp
    passes = c.passes * np.where(jobs.compiled > 0, c.compiled, 1.0) * features
    casts = np.where(jobs.fp8 > 0, c.fp8_casts * (3 * width + up) / tp, 0.0)
    return jobs.param_bytes * jobs.tokens * (passes + casts) / _memory_rate(jobs)


def _host(jobs: Jobs, c: Constants) -> Column:
    """Seconds that a host takes to start the kernels of a layer's forward pass."""
    base = c.host * np.where(jobs.is_h100 > 0, c.host_h100, 1.0)
    base = base * (1 + c.host_sharded * (jobs.zero >= 2))
    base = base * np.where(jobs.compiled > 0, c.host_compiled, 1.0)
    # Over AWS's network, messages between stages hold up every collective of tensor parallelism.
    held = (jobs.efa > 0) & (jobs.pp > 1) & (jobs.tp > 1) & (jobs.ranks > jobs.node_size)
    return base + np.where(held, c.efa_tp * jobs.tp, 0.0)


def _tensor_parallel(jobs: Jobs, c: Constants) -> Column:
    """Seconds of a forward pass: two all-reduces, or as many bytes gathered and scattered."""
    nbytes = jobs.param_bytes * jobs.tokens * jobs.width
    whole = 2 * collective(jobs, c, nbytes, jobs.tp, jobs.tp, 2.0)
    return whole * np.where(jobs.overlapped > 0, c.overlapped, 1.0)


def _context_parallel(jobs: Jobs, c: Constants, attention: Column) -> Column:
    """Seconds of a ring of keys and values: what attention does not hide, and adding up parts.

    Each of the cp - 1 steps has its messages, its kernels to start, and reads and writes the
    output once to add its part.
    """
    steps = jobs.cp - 1
    nbytes = 2 * jobs.param_bytes * jobs.tokens * jobs.kv_width / jobs.tp
    near = jobs.tp * jobs.cp <= jobs.node_size
    bandwidth = np.where(near, jobs.link * c.link, jobs.net * c.net)
    ring = _exposed(steps * nbytes / bandwidth, 0.7 * attention)
    added = 3 * jobs.param_bytes * jobs.tokens * jobs.width / jobs.tp / _memory_rate(jobs)
    return np.where(steps > 0, ring + steps * (added + c.message + 0.1 * _host(jobs, c)), 0.0)


# --- the ends, the pipeline -----------------------------------------------------------------------


def _head(jobs: Jobs, c: Constants) -> Column:
    """Seconds of scores and loss for one microbatch, forward and backward."""
    scores = jobs.vocab / jobs.tp
    loss = c.loss_passes * 4 * jobs.tokens * scores / _memory_rate(jobs)
    return (
        3 * _product(jobs, c, jobs.tokens, scores, jobs.width) + loss + c.host_ends * _host(jobs, c)
    )


def _added_up(jobs: Jobs, c: Constants) -> Column:
    """Seconds to add a microbatch's gradients to those of the others."""
    own = jobs.parameters / np.where(jobs.zero >= 2, jobs.shard, 1.0)
    seconds = own * (2 * jobs.grad_bytes + 2) / _memory_rate(jobs)
    return np.where(jobs.microbatches > 1, seconds, 0.0)


def _message(jobs: Jobs, c: Constants) -> Column:
    """Seconds that a microbatch waits for its messages, there and back."""
    nbytes = jobs.param_bytes * jobs.tokens * jobs.width
    nbytes = nbytes / np.where(jobs.split > 0, jobs.tp, 1.0)
    far = jobs.tp * jobs.cp * jobs.dp >= jobs.node_size
    bandwidth = np.where(far, jobs.net * c.net, jobs.link * c.link)
    latency = np.where(jobs.blocking > 0, c.message_blocking, c.message)
    seconds = 2 * (latency + c.message_bytes * nbytes / bandwidth) * jobs.parts
    seconds = seconds * np.where(jobs.overlapped > 0, c.overlapped, 1.0)
    return np.where(jobs.pp > 1, seconds, 0.0)


# --- what follows the last microbatch -------------------------------------------------------------


def _data_parallel(jobs: Jobs, c: Constants, stage: Column) -> Column:
    """Seconds of gradients and sharded parameters that do not hide behind computing."""
    gradients, weights = jobs.parameters * jobs.grad_bytes, jobs.parameters * jobs.param_bytes
    n, near = jobs.replicas, _near(jobs)
    backward = stage * 2 / 3
    ddp = _exposed(collective(jobs, c, gradients, n, near, 2.0), c.overlap * backward)
    scatter = _exposed(collective(jobs, c, gradients, n, near, 1.0), c.overlap * backward)
    zero1 = scatter + collective(jobs, c, weights, n, near, 1.0)
    sharded = _sharded(jobs, c, stage, gradients, weights)
    # Hybrid: the shards' gradients are reduced over the groups of ranks that shard.
    groups = n / np.maximum(jobs.shard, 1)
    over = collective(jobs, c, gradients / jobs.shard, groups, near / jobs.shard, 2.0)
    sharded = sharded + np.where(groups > 1, _exposed(over, c.overlap * backward), 0.0)
    return np.where(jobs.zero >= 2, sharded, np.where(jobs.zero == 1, zero1, ddp))


def _sharded(jobs: Jobs, c: Constants, stage: Column, gradients: Column, weights: Column) -> Column:
    """Seconds of the gathers and scatters of FSDP, layer by layer for every microbatch."""
    n, near = jobs.shard, np.minimum(_near(jobs), jobs.shard)
    starts = collective(jobs, c, np.ones_like(stage), n, near, 1.0) * (jobs.layers / jobs.pp - 1)
    gather = collective(jobs, c, weights, n, near, 1.0) + starts
    gather = np.where(jobs.shared > 0, 0.0, np.where(jobs.zero == 3, 2.0, 1.0) * gather)
    scatter = collective(jobs, c, gradients, n, near, 1.0) + starts
    moved = gather + scatter / np.where(jobs.once > 0, jobs.microbatches, 1.0)
    exposed = _exposed(moved, c.overlap_sharded * stage) + c.interference * moved
    return jobs.microbatches * exposed


def _optimizer(jobs: Jobs, c: Constants) -> Column:
    """Seconds of AdamW: gradient, master, two moments read, and all but the gradient written."""
    parts = np.where(jobs.zero >= 2, jobs.shard, np.where(jobs.zero == 1, jobs.replicas, 1.0))
    return c.adam * 30 * jobs.parameters / parts / _memory_rate(jobs)


def _allocator(jobs: Jobs, c: Constants, held: Column) -> Column:
    """Seconds to give memory back and to ask for it again, in every microbatch."""
    over = np.clip((held / jobs.memory - c.room) / _EDGE, -50.0, 50.0)
    return jobs.microbatches * c.refill / (1 + np.exp(-over))


# --- communication --------------------------------------------------------------------------------


def collective(
    jobs: Jobs, c: Constants, nbytes: Column, n: Column, near: Column, factor: float
) -> Column:
    """Return the seconds of a collective (see the top of this file).

    Args:
        jobs: Their machines.
        c: Constants.
        nbytes: Of the whole: gathered, or before it is scattered.
        n: Ranks.
        near: How many of them share a node.
        factor: 1 for gather and scatter, 2 for all-reduce.
    """
    n = np.maximum(n, 1.0)
    near = np.clip(near, 1.0, np.minimum(n, jobs.node_size))
    nodes = n / near
    seconds = nbytes * (near - 1) / near * factor / (jobs.link * c.link)
    seconds = seconds + c.link_latency * np.log2(near) * factor**0.5
    latency = np.where(jobs.efa > 0, c.efa_latency, c.net_latency)
    over = nbytes * (nodes - 1) / nodes * factor / (jobs.net * near * c.net)
    over = over + latency * np.maximum(nodes - 1, 0.0) ** c.net_growth * near**0.5
    return np.where(n > 1, seconds + np.where(nodes > 1.001, over, 0.0), 0.0)


def _near(jobs: Jobs) -> Column:
    """How many of the ranks with the same part of the model share a node; tp's come first."""
    return np.clip(jobs.node_size / jobs.tp, 1.0, jobs.replicas)


def _larger(a: Column, b: Column) -> Column:
    """Return a smooth maximum."""
    p = _MAXIMUM_POWER
    return (a**p + b**p) ** (1 / p)


def _exposed(communication: Column, cover: Column) -> Column:
    """Return what of the communication is not hidden behind computing of some length."""
    return _larger(communication, cover) - cover
