"""Snapshots: copies of a rank's slices, from which a save continues while training does.

A stager keeps one buffer and uses it again: new pages cost more than the copy. `num_bytes` is its
size, and `close` frees it. The names are torch's; there is one way to stage.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from dure.checkpoint.slice_files import Slice
from dure.comm.checksum import copy_bytes
from dure.comm.reduction import as_bytes
from dure.torch_private import pytree

__all__ = ["AsyncStager", "BlockingAsyncStager", "DefaultStager", "StagingOptions"]

_ALIGNMENT = 64


@dataclass(frozen=True)
class StagingOptions:
    """torch's options, without effect: a snapshot is one copy, made before the call returns.

    A thread that copied later would see what the next step writes.

    Attributes:
        use_pinned_memory: No effect.
        use_shared_memory: No effect.
        use_async_staging: No effect.
        use_non_blocking_copy: No effect.

    Example:
        ```python
        from dure.checkpoint.staging import DefaultStager, StagingOptions

        stager = DefaultStager(StagingOptions())  # accepted for programs that pass them
        ```
    """

    use_pinned_memory: bool = True
    use_shared_memory: bool = True
    use_async_staging: bool = True
    use_non_blocking_copy: bool = True


class AsyncStager(Protocol):
    """What `async_save` takes snapshots with.

    Example:
        ```python
        from dure.checkpoint.staging import BlockingAsyncStager

        class Counting(BlockingAsyncStager):  # a custom stager; its `hold` is called
            held = 0

            def hold(self, memory):
                self.held += len(memory)
                return super().hold(memory)
        ```
    """

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that it holds."""
        ...

    def hold(self, memory: dict[Slice, torch.Tensor]) -> dict[Slice, torch.Tensor]:
        """Return copies, which are valid until the next call.

        Args:
            memory: Tensors, by slice.
        """
        ...

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a state. `async_save` calls `hold` instead.

        Args:
            state_dict: The state.
        """
        ...

    def synchronize_staging(self) -> None:
        """Wait until `stage` has copied."""
        ...

    def close(self) -> None:
        """Give the memory back, after the save that uses it."""
        ...


class BlockingAsyncStager:
    """Copies into one buffer of the CPU's memory.

    Args:
        cache_staged_state_dict: Keep the buffer from save to save.
        type_check: No effect.

    Example:
        ```python
        stager = BlockingAsyncStager(cache_staged_state_dict=True)
        for step in range(2):  # the second save copies into the memory of the first
            dist.checkpoint.async_save(
                {"weight": torch.ones(2)}, checkpoint_id=f"run/{step}", async_stager=stager
            ).result()
        stager.close()
        ```
    """

    def __init__(self, cache_staged_state_dict: bool = False, type_check: bool = False) -> None:
        self.cache_staged_state_dict = cache_staged_state_dict
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that it holds."""
        return self._buffer.numel()

    def hold(self, memory: dict[Slice, torch.Tensor]) -> dict[Slice, torch.Tensor]:
        """Return copies, which are valid until the next call.

        Args:
            memory: Tensors, by slice.

        Cost:
            One pass over the bytes; memory: as many, the first time.
        """
        begins: list[int] = []
        end = 0
        for tensor in memory.values():
            begins.append(end)
            num_bytes = tensor.numel() * tensor.element_size()
            end += num_bytes + -num_bytes % _ALIGNMENT
        if end > self.num_bytes or not self.cache_staged_state_dict:
            self.close()  # before there is another
            self._buffer = torch.empty(end, dtype=torch.uint8, device="cpu")
        found: dict[Slice, torch.Tensor] = {}
        for begin, (part, tensor) in zip(begins, memory.items(), strict=True):
            num_bytes = tensor.numel() * tensor.element_size()
            place = self._buffer[begin : begin + num_bytes]
            found[part] = place.view(tensor.dtype).view(tensor.shape)
            if tensor.is_cpu and tensor.is_contiguous():
                copy_bytes(_bytes(place), _bytes(as_bytes(tensor)))
            else:
                found[part].copy_(tensor)
        return found

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a state, in the CPU's memory. `async_save` calls `hold` instead.

        Args:
            state_dict: The state.
        """
        return pytree.tree_map(_copied, state_dict)

    def synchronize_staging(self) -> None:
        """Return at once: `stage` has copied."""

    def close(self) -> None:
        """Give the memory back, after the save that uses it."""
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return deepcopy(value)


def _bytes(flat: torch.Tensor) -> memoryview:
    return memoryview(cast(Any, flat.numpy()))


class DefaultStager(BlockingAsyncStager):
    """The same, and keeps its buffer.

    Args:
        config: No effect.

    Example:
        ```python
        stager = DefaultStager()
        saving = dist.checkpoint.async_save(
            {"weight": torch.ones(2)}, checkpoint_id="run/2", async_stager=stager
        )
        saving.result()
        stager.close()
        ```
    """

    def __init__(self, config: StagingOptions | None = None) -> None:
        super().__init__(cache_staged_state_dict=True)
        self.config = config or StagingOptions()
