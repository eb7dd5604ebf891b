"""`SyncBatchNorm`: the layer, under torch's name, with torch's arguments and state_dict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn.modules.lazy import LazyModuleMixin

from dure.comm.world import current_world, resolve
from dure.errors import ModuleError, ShapeError
from dure.parallel.batch_norm.statistics import NormalizeOverRanks, Running
from dure.torch_private import BatchNorm

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(BatchNorm):
    """Batch normalisation in which all ranks together are one batch.

    In training, mean and variance are those of the ranks' batches taken together, of any
    sizes, so that n ranks compute what one rank would with the full batch. In evaluation it is
    `torch.nn.BatchNorm`, and so it is without a process group, or on one rank.

    Collective:
        Each training forward, with and without gradients, and each backward to the input, on all
        ranks of the group. A rank may have an empty batch, but must call.

    Cost:
        One all_gather of 2C + 1 numbers in forward, one all_reduce of 2C in backward.

    Numerics:
        See statistics.py; bitwise the same statistics on all ranks. Statistics, and sums of
        gradients, are of float32 for float16 and bfloat16.

    Shapes:
        input [N, C, *], output the same; any memory format.

    Args:
        num_features: C.
        eps: Added to the variance.
        momentum: Weight of a batch in the running statistics; None: all batches weigh the same.
        affine: Learn a weight and a bias for each channel.
        track_running_stats: Keep running statistics, for evaluation.
        process_group: The ranks that are one batch; all by default (those of the world at the
            time of forward).
        device: Where parameters and buffers are made.
        dtype: Their dtype.
        bias: With `affine`, whether to learn a bias.

    Raises:
        ShapeError: The input has less than 2 dimensions, another number of channels, or, on all
            ranks, one value per channel altogether.

    Example:
        ```python
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        model = dist.SyncBatchNorm.convert_sync_batchnorm(model)
        assert isinstance(model[1], dist.SyncBatchNorm)
        model = dist.DistributedDataParallel(model)
        ```
    """

    communicates_in_forward = True
    """Tells `Join` that a rank without inputs would be missed here."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        if not bias:  # torch before 2.13 has no such argument
            self.register_parameter("bias", None)
        self.process_group = process_group

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise `input` [N, C, *]."""
        self._check_input_dim(input)
        group = self._group() if self.training else None
        if group is None or group.size() == 1:
            return self._normalize_alone(input)
        running = Running(
            mean=self.running_mean if self.track_running_stats else None,
            variance=self.running_var if self.track_running_stats else None,
            factor=self._count_batch(),
        )
        apply = cast("Any", NormalizeOverRanks.apply)
        return apply(input, self.weight, self.bias, running, self.eps, group)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2 or input.size(1) != self.num_features:
            raise ShapeError(
                "SyncBatchNorm got an input of the wrong shape",
                seen=f"{list(input.shape)}, expected [N, {self.num_features}, *]",
            )

    def _group(self) -> ProcessGroup | None:
        """Return the ranks that are one batch; None where there are no groups."""
        if self.process_group is None:
            return current_world().default
        return resolve(self.process_group, "SyncBatchNorm")

    def _count_batch(self) -> float:
        """Count a training batch; return its weight in the running statistics."""
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                return 1.0 / float(self.num_batches_tracked)
        return self.momentum or 0.0

    def _normalize_alone(self, input: torch.Tensor) -> torch.Tensor:
        """Do what `torch.nn.BatchNorm` does."""
        factor = self._count_batch() if self.training else 0.0
        kept = not self.training or self.track_running_stats
        return torch.nn.functional.batch_norm(
            input,
            self.running_mean if kept else None,
            self.running_var if kept else None,
            self.weight,
            self.bias,
            self.training or (self.running_mean is None and self.running_var is None),
            factor,
            self.eps,
        )

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_group: ProcessGroup | None = None
    ) -> torch.nn.Module:
        """Replace all `BatchNorm*` layers of `module` by `SyncBatchNorm`.

        Parameters and buffers are kept, as the very same tensors, so an optimizer that has them
        continues to work. Call it before wrapping the module in DDP. A layer that is used in
        several places stays one layer.

        Args:
            module: Is changed in place, unless it is itself a `BatchNorm*`.
            process_group: The ranks that are one batch; all by default.

        Returns:
            `module`, or the layer that takes its place.

        Raises:
            ModuleError: A layer does not know its number of channels yet (`LazyBatchNorm`).
        """
        return _converted(cls, module, process_group, {})


def _converted(
    kind: type[SyncBatchNorm],
    module: torch.nn.Module,
    group: ProcessGroup | None,
    done: dict[torch.nn.Module, torch.nn.Module],
) -> torch.nn.Module:
    """Convert `module` and what is below it; `done` holds what has been converted."""
    if module in done:
        return done[module]
    result = _one_converted(kind, module, group) if isinstance(module, BatchNorm) else module
    done[module] = result
    for name, child in list(module._modules.items()):  # pyright: ignore[reportPrivateUsage]
        if child is not None:
            result.add_module(name, _converted(kind, child, group, done))
    return result


def _one_converted(
    kind: type[SyncBatchNorm], module: BatchNorm, group: ProcessGroup | None
) -> SyncBatchNorm:
    if isinstance(module, LazyModuleMixin):  # the first forward makes it another class
        raise ModuleError(
            f"a {type(module).__name__} does not know its number of channels yet",
            fix="Run one forward with a sample batch before the conversion.",
        )
    layer = kind(
        module.num_features,
        module.eps,
        module.momentum,
        module.affine,
        module.track_running_stats,
        group,
        device="meta",
    )
    layer.weight, layer.bias = module.weight, module.bias
    layer.running_mean, layer.running_var = module.running_mean, module.running_var
    layer.num_batches_tracked = module.num_batches_tracked
    layer.training = module.training
    if hasattr(module, "qconfig"):
        layer.qconfig = module.qconfig
    return layer
