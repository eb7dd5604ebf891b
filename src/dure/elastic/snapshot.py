"""A copy of the state in memory of its own: taken in place, put back, sent to another rank.

The state is taken apart as a checkpoint's is (`dure.checkpoint.tree`): a tree of plain values, and
tensors by name. A snapshot keeps one buffer for each tensor, and copies into it again and again, so
that after the first time taking a snapshot costs one pass over the tensors and no memory.

It travels as one message of JSON (the tree, and what each tensor is) and one for each tensor; no
code is ever carried, and nothing is unpickled.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from dure import torch_private
from dure.checkpoint.dataclass_fields import fields_of
from dure.checkpoint.objects import is_sharded, load_into, state_of
from dure.checkpoint.randomness import random_state, restore_random_state, seed_new_rank
from dure.checkpoint.scalers import Stages, set_stages, stages_of
from dure.checkpoint.tree import decode, encode
from dure.errors import UsageError

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["Snapshot", "require_returnable"]

_VALUES = "values"
_RANDOM = "random"
_RETURNED = (dict, OrderedDict, Counter, str)
"""Kinds that come back as what they are, of those that have kinds like them."""


class Snapshot:
    """One copy of a state. Threads: one at a time.

    Obtained from:
        Dure makes them: `State.commit` copies into one.
    """

    def __init__(self) -> None:
        self.step = -1  # the commit that it belongs to; -1 while it holds nothing
        self._trees: dict[str, Any] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._random: dict[str, Any] | None = None
        self._stages: dict[str, Stages] = {}  # of the scalers that are within a step

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def take(self, parts: Mapping[str, Any], values: Mapping[str, Any], step: int) -> None:
        """Copy the state as it is now.

        Raises:
            UsageError: Something cannot be copied; the message names it, and the snapshot is void.

        Cost:
            Reads and writes each byte of the tensors once.
        """
        self.step = -1
        tensors: dict[str, torch.Tensor] = {}
        trees: dict[str, Any] = {}
        for name, part in parts.items():
            if is_sharded(part):
                raise UsageError(
                    f"the state of {name!r} is divided among the ranks",
                    seen="what a rank alone holds is lost with it",
                    fix="Use an optimizer whose full state each rank holds.",
                )
            trees[name] = encode(state_of(name, part), name, tensors)
        for name, value in values.items():
            require_returnable(value, name)
        trees[_VALUES + "/"] = encode(dict(values), _VALUES + "/", tensors)
        self._trees = trees
        self._stages = {name: stages_of(part, parts) for name, part in parts.items()}
        self._copy(tensors)
        self._random = random_state()
        self.step = step

    def _copy(self, tensors: dict[str, torch.Tensor]) -> None:
        """Copy tensors into the buffers that fit; others are made."""
        kept, sources, targets = {}, [], []
        for name, tensor in tensors.items():
            buffer = self._buffers.get(name)
            like = None if buffer is None else (buffer.shape, buffer.dtype, buffer.device)
            if buffer is not None and like == (tensor.shape, tensor.dtype, tensor.device):
                sources.append(tensor)
                targets.append(buffer)
                kept[name] = buffer
            else:
                kept[name] = tensor.clone(memory_format=torch.contiguous_format)
        self._buffers = kept
        if targets:
            torch_private.foreach_copy_(targets, sources)

    def tensor(self, name: str) -> torch.Tensor:
        return self._buffers[name]

    def holds(self, name: str) -> bool:
        return name in self._trees

    def put_back(self, name: str, part: Any, parts: Mapping[str, Any]) -> None:
        """Load the copy of a part into `part`; a scaler also needs its optimizers, in `parts`."""
        load_into(name, part, self._trees[name], self.tensor)
        if self._stages.get(name):
            set_stages(part, self._stages[name], parts)

    def values(self) -> dict[str, Any]:
        """Return the plain values, new ones each time."""
        return decode(self._trees[_VALUES + "/"], lambda name: self._buffers[name].clone())

    def put_back_randomness(self) -> None:
        if self._random is not None:
            restore_random_state(self._random)

    # ---- to another rank -----------------------------------------------------------------------

    def send(self, group: ProcessGroup, peer: int) -> None:
        """Send it to the rank `peer` of `group`, which calls `receive`."""
        where = group.message_device
        random = encode(self._random, _RANDOM, {})
        described = [
            (name, str(b.dtype).removeprefix("torch."), list(b.shape), str(b.device.type))
            for name, b in self._buffers.items()
        ]
        text = json.dumps([self.step, self._trees, self._stages, random, described]).encode()
        group.send(torch.tensor([len(text)], device=where), peer)
        group.send(torch.frombuffer(bytearray(text), dtype=torch.uint8).to(where), peer)
        for buffer in self._buffers.values():
            if buffer.numel():
                group.send(buffer.to(where), peer)

    def receive(self, group: ProcessGroup, peer: int) -> None:
        """Take over what `peer` sends; the random generators begin with numbers of their own."""
        where = group.message_device
        self.step = -1
        size = torch.zeros(1, dtype=torch.int64, device=where)
        group.recv(size, peer)
        data = torch.empty(int(size.item()), dtype=torch.uint8, device=where)
        group.recv(data, peer)
        step, trees, self._stages, random, described = json.loads(data.cpu().numpy().tobytes())
        self._buffers = {}
        for name, dtype, shape, device in described:
            buffer = torch.empty(shape, dtype=getattr(torch, dtype), device=where)
            if buffer.numel():
                group.recv(buffer, peer)
            self._buffers[name] = buffer.to(device)
        self._trees, self._random = trees, None
        seed_new_rank(decode(random, self._buffers.__getitem__), group.rank())
        self._random = random_state()
        self.step = step


def require_returnable(value: object, path: str) -> None:
    """Refuse a value that would not come back, or as another kind of thing, after a failure.

    Raises:
        UsageError: The value is such; `path` is named.
    """
    if isinstance(value, torch.Tensor):
        if value.is_leaf and value.requires_grad:
            raise UsageError(
                f"the state's {path} is a tensor that is trained, not a value",
                seen="an optimizer would continue with the old one after a failure",
                fix="Put it into a module (nn.Parameter, nn.ParameterDict) and that into the "
                "state; or detach() it.",
            )
    elif fields_of(value) is not None or (
        isinstance(value, Mapping | str | bytearray) and type(value) not in _RETURNED
    ):
        raise UsageError(
            f"the state's {path} would not come back as what it is after a failure",
            seen=f"it is a {type(value).__qualname__}",
            fix="Use dict, OrderedDict, Counter or str; or an object with state_dict and "
            "load_state_dict.",
        )
    elif isinstance(value, Mapping):
        for key, item in cast(Mapping[object, object], value).items():
            require_returnable(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple | set | frozenset):
        for i, item in enumerate(cast(Sequence[object], value)):
            require_returnable(item, f"{path}[{i}]")
    elif not isinstance(value, str | np.ndarray | bytes):  # which may be large
        try:
            encode(value, path, {})
        except UsageError:
            raise UsageError(
                f"the state's {path} cannot be kept",
                seen=f"it is a {type(value).__qualname__}",
                fix="Keep numbers, strings, tensors, and lists, tuples, sets and dicts of them, "
                "and make the rest within train().",
            ) from None
