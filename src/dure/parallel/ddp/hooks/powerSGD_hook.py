"""PowerSGD: gradients of matrices sent as the product of two thin ones.

For a matrix M [n, m] of gradients on each rank, and Q [m, r] the same on all ranks, r small:

        M += E                        E: the part that earlier steps did not send (*error feedback*)
    Q  = orthonormal basis of Q
    P  = M Q                      summed over ranks
    P  = orthonormal basis of P
    Q  = M^T P                    averaged over ranks
    result = P Q^T                the same on all ranks
    E  = M - result

That is one step of subspace iteration on the mean of the ranks' M; because Q is kept for the next
step (*warm start*), and gradients change slowly, the basis converges during training. The part that
a step loses is not lost for good: it is in E, and sent when it has grown.

A matrix is compressed if that saves enough:

    (n + m) r * min_compression_rate < n m

The *rest* (vectors, small matrices) is summed as it is, in the same collective as the Ps. A bucket
costs two all_reduces: the first of rest + r * sum(n) elements, the second of r * sum(m).

E and Q are kept under the names of their parameters: they stay valid when DDP cuts its buckets
again, and when a job resumes from a pickled state. With r as large as the smaller side of M,
nothing is lost and the result is the mean.

Source: Vogels et al., PowerSGD, https://arxiv.org/abs/1905.13727.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dure.comm.futures import Later
from dure.comm.ops import ReduceOp
from dure.errors import UsageError
from dure.parallel.ddp.buckets import GradBucket
from dure.parallel.ddp.hooks.default_hooks import average

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = [
    "PowerSGDState",
    "batched_powerSGD_hook",
    "first_basis",
    "orthogonalize",
    "powerSGD_hook",
]

logger = logging.getLogger(__name__)


class PowerSGDState:
    """Settings of PowerSGD, and what it keeps from step to step; one for each DDP module.

    It can be pickled, and so saved with a model; the group is not part of that. Each rank has its
    own errors, so each rank saves its own state.

    Args:
        process_group: The ranks; those of the DDP module by default.
        matrix_approximation_rank: r; 1 to 4 is usual, up to 32 for language models.
        start_powerSGD_iter: Steps of plain averaging before: gradients of the first steps, when
            everything changes fast, compress badly.
        min_compression_rate: How much must be saved for a matrix to be compressed.
        use_error_feedback: Add what was not sent to the next step's gradients.
        warm_start: Start from the last step's Q, and not from a random one.
        orthogonalization_epsilon: Added to lengths before dividing by them (r = 1). Columns of
            zeros need none here: they are replaced by a unit vector.
        random_seed: Of the random Qs; the same on all ranks.
        compression_stats_logging_frequency: Steps between two lines of statistics in the log.
        batch_tensors_with_same_shape: Work on matrices of one shape together: fewer, larger
            operations, for a copy of them.

    Attributes:
        iter: Steps so far.
        error_dict: E of each parameter by its name.
        q_memory_dict: Q of each parameter by its name.

    Raises:
        UsageError: The rank is not positive, or the start negative.

    Example:
        ```python
        model = dist.DistributedDataParallel(torch.nn.Linear(2, 1))
        state = dist.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=10)
        model.register_comm_hook(state, dist.powerSGD_hook)
        ```
    """

    def __init__(
        self,
        process_group: ProcessGroup | None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
    ) -> None:
        if matrix_approximation_rank < 1 or start_powerSGD_iter < 0:
            raise UsageError(
                "PowerSGD needs a rank of 1 or more, and a first step",
                seen=f"matrix_approximation_rank={matrix_approximation_rank}, "
                f"start_powerSGD_iter={start_powerSGD_iter}",
            )
        self.process_group = process_group
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback, self.warm_start = use_error_feedback, warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.random_seed = random_seed
        self.compression_stats_logging_frequency = max(1, compression_stats_logging_frequency)
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        self.iter = self.next_stats_report = 0
        self.error_dict: dict[str, torch.Tensor] = {}
        self.q_memory_dict: dict[str, torch.Tensor] = {}
        self.total_numel_before_compression = self.total_numel_after_compression = 0

    def __getstate__(self) -> dict[str, object]:
        """Return all but the group."""
        return {**self.__dict__, "process_group": None}

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Count a step at its last bucket, and log the statistics if it is time."""
        if not bucket.is_last():
            return
        self.iter += 1
        if self.iter == self.start_powerSGD_iter:
            logger.info("PowerSGD starts after %s steps", self.iter)
        elif self.iter > max(self.start_powerSGD_iter, self.next_stats_report):
            rate, before, after = self.compression_stats()
            logger.info("PowerSGD: %s numbers sent as %s, rate %.1f", before, after, rate)
            self.next_stats_report = self.iter + self.compression_stats_logging_frequency

    def compression_stats(self) -> tuple[float, int, int]:
        """Return the rate of compression, and the elements before and after it, so far."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after else 0, before, after)

    def with_error(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """Return `gradient` as a matrix [n, m], with E added in place."""
        error = self.error_dict.get(name) if self.use_error_feedback else None
        if error is not None and error.numel() == gradient.numel():
            gradient.add_(error.view(gradient.shape))
        return gradient.reshape(gradient.shape[0], -1)

    def basis(self, names: Sequence[str], shape: tuple[int, int, int], like: torch.Tensor) -> Any:
        """Return orthonormal Q [b, m, r] of the parameters `names`: kept ones, else random."""
        kept = [self.q_memory_dict.get(name) for name in names] if self.warm_start else [None]
        if all(q is not None and q.shape == shape[1:] for q in kept):
            q = torch.stack([q for q in kept if q is not None])
        else:
            q = first_basis((self.random_seed, self.iter, *names), shape, like)
        return orthogonalize(q, self.orthogonalization_epsilon)

    def keep(self, names: Sequence[str], qs: torch.Tensor, errors: torch.Tensor | None) -> None:
        """Keep Q [b, m, r] and E [b, n, m] of the parameters `names` for the next step.

        Not those of gradients that were not finite on some rank, as happens with a `GradScaler`:
        that step is skipped, but they would spoil all later ones. Q shows it, equally on all ranks.
        """
        finite = qs.isfinite().flatten(1).all(1).tolist()
        for i, name in enumerate(names):
            if not finite[i]:
                self.q_memory_dict.pop(name, None)
                self.error_dict.pop(name, None)
                continue
            if self.warm_start:
                self.q_memory_dict[name] = qs[i].clone()
            if errors is not None:
                self.error_dict[name] = errors[i]


@dataclass(slots=True, kw_only=True)
class _Stack:
    """Matrices of one shape on their way through a step.

    Attributes:
        names: Their keys in the state.
        targets: Where the results go, in any shape.
        m: M [b, n, m], with the error added.
        p: P [b, n, r].
        q: Q [b, m, r].
    """

    names: list[str]
    targets: list[torch.Tensor]
    m: torch.Tensor
    p: torch.Tensor
    q: torch.Tensor


class _Compression:
    """One bucket's step: the inputs of its two collectives, and the use of their results."""

    def __init__(self, state: PowerSGDState, group: ProcessGroup, buffer: torch.Tensor) -> None:
        self._state, self._group, self._buffer = state, group, buffer
        self.stacks: list[_Stack] = []
        self.rest: list[torch.Tensor] = []

    def add(self, names: list[str], gradients: list[torch.Tensor], rank: int) -> None:
        """Take in gradients of one shape, to be compressed together."""
        state = self._state
        m = torch.stack([state.with_error(*each) for each in zip(names, gradients, strict=True)])
        q = state.basis(names, (len(names), m.shape[2], rank), m)
        self.stacks.append(_Stack(names=names, targets=gradients, m=m, p=m @ q, q=q))

    def run(self) -> torch.futures.Future[Any]:
        """Start the first collective; return a future of the bucket's result."""
        ps = [stack.p for stack in self.stacks]
        first = _flat([*ps, *self.rest], self._buffer)
        work = self._group.all_reduce(first, ReduceOp.SUM, async_op=True)
        assert work is not None

        # Kept outside the future, because CUDA futures find tensors by pickling.
        second: list[Any] = []

        def project(future: torch.futures.Future[Any]) -> torch.Tensor:
            """Make the Qs from the summed Ps, and start the second collective."""
            future.value()
            parts = _split(first, [*ps, *self.rest])
            for tensor, total in zip(self.rest, parts[len(ps) :], strict=True):
                tensor.copy_(total).div_(self._group.size())
            for stack, p in zip(self.stacks, parts, strict=False):
                stack.p = orthogonalize(p, self._state.orthogonalization_epsilon)
                stack.q = stack.m.transpose(1, 2) @ stack.p
            qs = _flat([stack.q for stack in self.stacks], self._buffer)
            second.append(self._group.all_reduce(qs, ReduceOp.AVG, async_op=True))
            return qs

        if not self.stacks:
            return work.get_future().then(lambda future: self._only_rest(future, first))
        projected = work.get_future().then(project)
        devices = [self._buffer.device] if self._buffer.device.type != "cpu" else []
        # Not chained: the other buckets' second collectives shall start before this one is awaited.
        return Later(lambda: self._finish(projected.wait(), second[0]), devices=devices)

    def _only_rest(self, future: torch.futures.Future[Any], total: torch.Tensor) -> torch.Tensor:
        """Put sums in place as means, where nothing was compressed."""
        future.value()
        for tensor, part in zip(self.rest, _split(total, self.rest), strict=True):
            tensor.copy_(part).div_(self._group.size())
        return self._buffer

    def _finish(self, qs: torch.Tensor, work: Any) -> torch.Tensor:
        """Multiply out, and keep what the next step needs."""
        work.wait()
        for stack, q in zip(self.stacks, _split(qs, [s.q for s in self.stacks]), strict=True):
            result = stack.p @ q.transpose(1, 2)
            errors = stack.m.sub_(result) if self._state.use_error_feedback else None
            for target, matrix in zip(stack.targets, result, strict=True):
                target.copy_(matrix.view(target.shape))
            self._state.keep(stack.names, q, errors)
        return self._buffer


def _flat(tensors: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Lay tensors end to end."""
    return torch.cat([t.reshape(-1) for t in tensors]) if tensors else like.new_empty(0)


def _split(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parts of `flat` that belong to `tensors`, in their shapes."""
    parts = flat.split([t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]


def _checked(state: object) -> PowerSGDState:
    """Return `state`, if it is one."""
    if isinstance(state, PowerSGDState):
        return state
    raise UsageError(
        "PowerSGD needs a state",
        seen=f"a {type(state).__name__}",
        fix="Write register_comm_hook(PowerSGDState(None), powerSGD_hook).",
    )


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket's gradients, each matrix by its approximation of low rank.

    Args:
        state: One for all buckets of a module.
        bucket: The gradients.

    Returns:
        A future of the averaged bucket.

    Cost:
        Two all_reduces a bucket, of rest + r sum(n) and of r sum(m) elements; 4 r n m
        multiplications a matrix; memory for E (as the gradients) and Q.

    Numerics:
        Bitwise the same on all ranks.

    Example:
        ```python
        from dure.algorithms.ddp_comm_hooks import powerSGD_hook as powerSGD

        ddp = dist.DistributedDataParallel(torch.nn.Linear(64, 64))
        state = powerSGD.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD.powerSGD_hook)
        for _ in range(3):
            ddp(torch.full((1, 64), dist.get_rank() + 1.0)).sum().backward()
        assert torch.isfinite(ddp.module.weight.grad).all()
        ```
    """
    group = _checked(state).process_group or bucket.group
    buffer = bucket.buffer()
    early = state.iter < state.start_powerSGD_iter
    state.maybe_increase_iter(bucket)
    if early or buffer.is_sparse or not buffer.is_floating_point():
        return average(group, buffer)
    step = _Compression(state, group, buffer)
    chosen: list[tuple[str, torch.Tensor]] = []
    for name, gradient in zip(bucket.names(), bucket.gradients(), strict=True):
        after = _worth_compressing(
            gradient, state.matrix_approximation_rank, state.min_compression_rate
        )
        state.total_numel_before_compression += gradient.numel()
        state.total_numel_after_compression += after or gradient.numel()
        if after is None:
            step.rest.append(gradient)
        else:
            chosen.append((name, gradient))
    for members in _same_shapes(chosen, state.batch_tensors_with_same_shape):
        gradients = [gradient for _, gradient in members]
        rows = gradients[0].shape[0]
        rank = min(rows, gradients[0].numel() // rows, state.matrix_approximation_rank)
        step.add([name for name, _ in members], gradients, rank)
    return step.run()


def batched_powerSGD_hook(
    state: PowerSGDState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket as one square matrix of low rank, independent of the gradients' shapes.

    Fewer operations than `powerSGD_hook` has for a bucket of many small matrices, but gradients
    that have nothing to do with each other share rows, and more is lost.

    Args:
        state: One for all buckets of a module.
        bucket: The gradients, k of them.

    Cost:
        Two all_reduces a bucket, of r s elements each, with s = ceil(sqrt(k)).

    Numerics:
        Bitwise the same on all ranks.

    Returns:
        A future of the averaged bucket.

    Example:
        ```python
        ddp = dist.DistributedDataParallel(torch.nn.Linear(64, 64))
        state = powerSGD.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD.batched_powerSGD_hook)
        for _ in range(3):
            ddp(torch.full((1, 64), dist.get_rank() + 1.0)).sum().backward()
        assert torch.isfinite(ddp.module.weight.grad).all()
        ```
    """
    group = _checked(state).process_group or bucket.group
    buffer = bucket.buffer()
    early = state.iter < state.start_powerSGD_iter
    state.maybe_increase_iter(bucket)
    if early or buffer.is_sparse or not buffer.is_floating_point() or not buffer.numel():
        return average(group, buffer)
    side = math.ceil(math.sqrt(buffer.numel()))
    square = buffer.new_zeros(side, side)
    square.view(-1)[: buffer.numel()] = buffer
    rank = min(side, state.matrix_approximation_rank)
    state.total_numel_before_compression += buffer.numel()
    state.total_numel_after_compression += 2 * side * rank
    step = _Compression(state, group, square)
    names = bucket.names()
    step.add([f"{names[0]} to {names[-1]}, {buffer.numel()}"], [square], rank)
    return step.run().then(lambda done: buffer.copy_(done.value().view(-1)[: buffer.numel()]))


def orthogonalize(matrices: torch.Tensor, epsilon: float = 0) -> torch.Tensor:
    """Return orthonormal bases of the columns of `matrices`.

    A single column is divided by its length; more of them go through a QR factorisation, which
    keeps its columns orthogonal even where those it is given are not independent. Nothing comes out
    as zero or NaN that did not come in so: from a column of zeros comes a unit vector, so that a
    gradient that vanished once does not leave a basis that can see nothing forever.

    Args:
        matrices: [b, n, r] with r <= n, of any real floating dtype.
        epsilon: Added to the length of a single column.

    Returns:
        [b, n, r], of the same dtype; computed in float32 at least.

    Cost:
        2 n r^2 multiplications a matrix.
    """
    dtype = matrices.dtype
    wide = matrices.float() if dtype.itemsize < 4 else matrices
    if matrices.shape[2] > 1:
        return torch.linalg.qr(wide).Q.to(dtype)
    length = wide.norm(dim=1, keepdim=True)
    unit = torch.zeros_like(wide)
    unit[:, 0] = 1
    return torch.where(length > 0, wide / (length + epsilon), unit).to(dtype)


def first_basis(seed: Hashable, shape: tuple[int, int, int], like: torch.Tensor) -> torch.Tensor:
    """Return random numbers [b, m, r], normal, that depend on `seed` alone: equal on all ranks.

    Args:
        seed: Anything whose repr is the same on all ranks.
        shape: Of the result.
        like: Has the dtype and device of the result.
    """
    digest = hashlib.blake2b(repr(seed).encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest) >> 1)
    return torch.randn(shape, generator=generator, device="cpu").to(like)


def _worth_compressing(gradient: torch.Tensor, rank: int, min_rate: float) -> int | None:
    """Return how many numbers are sent for `gradient` as a matrix; None if it shall go as it is."""
    if gradient.dim() < 2 or not gradient.numel():
        return None
    rows = gradient.shape[0]
    columns = gradient.numel() // rows
    after = (rows + columns) * min(rows, columns, rank)
    return after if after * min_rate < gradient.numel() else None


def _same_shapes(
    named: Sequence[tuple[str, torch.Tensor]], together: bool
) -> list[list[tuple[str, torch.Tensor]]]:
    """Return tensors of the same shape together, or each by itself."""
    if not together:
        return [[one] for one in named]
    groups: dict[tuple[int, ...], list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in named:
        groups.setdefault(tuple(tensor.shape), []).append((name, tensor))
    return list(groups.values())
