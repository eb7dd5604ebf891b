"""A model under the user's names: its state and its optimizers', taken and put back.

The functions of `state_dict` are calls of a `StateView`. It joins the names (`names`), the state of
parameters that have not been stepped (`fresh_state`), and the forms that options ask for
(`state_forms`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from dure.checkpoint.agreement import Ranks
from dure.checkpoint.fresh_state import fresh_state
from dure.checkpoint.names import Names
from dure.checkpoint.objects import is_sharded
from dure.checkpoint.replaced_methods import original_method
from dure.checkpoint.state_forms import (
    Path,
    State,
    cut_like,
    each_leaf,
    flattened,
    from_rank_0,
    nested_state,
    on_host,
    options_of,
)
from dure.errors import CheckpointMismatch, UsageError
from dure.tensor import DTensor

__all__ = ["IncompatibleKeys", "Optimizers", "StateDictOptions", "StateView", "as_tuple"]

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


@dataclass
class StateDictOptions:
    """How a state is taken, or put back.

    Args:
        full_state_dict: Whole tensors instead of DTensors. Taking them is collective.
        cpu_offload: Tensors on the CPU; with `full_state_dict` on rank 0 only, others get ``{}``.
        ignore_frozen_params: Leave out parameters that do not require gradients; when put back,
            they may be missing.
        keep_submodule_prefixes: With `submodules`, names as in the model; False: as in the
            submodule.
        strict: Raise where names are missing, or too many.
        broadcast_from_rank0: Rank 0 has the full tensors, others nothing: they are sent one by
            one, and each rank keeps its part. Needs `full_state_dict`; collective over the world.
        flatten_optimizer_state_dict: One level of names, with options for each parameter.
        dsd_fqn_modifiers: A method of modules, by name: its values are children that names leave
            out.

    Example:
        ```python
        from dure.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(fsdp.fully_shard(torch.nn.Linear(2, 1)), options=options)
        assert list(state) == (["weight", "bias"] if dist.get_rank() == 0 else [])
        ```
    """

    full_state_dict: bool = False
    cpu_offload: bool = False
    ignore_frozen_params: bool = False
    keep_submodule_prefixes: bool = True
    strict: bool = True
    broadcast_from_rank0: bool = False
    flatten_optimizer_state_dict: bool = False
    dsd_fqn_modifiers: str = "_fqn_modifiers"


class IncompatibleKeys(NamedTuple):
    """Names that were not in the state given, and names of it that were not used.

    Obtained from:
        `set_model_state_dict`, `set_state_dict`.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


class StateView:
    """A model under the user's names.

    Args:
        model: In any wrappers, sharded or not.
        options: See `StateDictOptions`.

    Raises:
        UsageError: ``broadcast_from_rank0`` without ``full_state_dict``.
    """

    def __init__(self, model: nn.Module, options: StateDictOptions | None) -> None:
        self._model, self._options = model, options or StateDictOptions()
        self._names = Names(model, self._options.dsd_fqn_modifiers)
        self._ranks = Ranks(None, "get_model_state_dict")
        if self._options.broadcast_from_rank0 and not self._options.full_state_dict:
            raise UsageError("full_state_dict must be True when broadcast_from_rank0 is True")

    # Taking.

    @torch.no_grad()
    def model_state(self, submodules: Iterable[nn.Module] | None) -> State:
        """Return the model's state."""
        state = {name: value for name, (_, value) in self._live().items()}
        if self._options.ignore_frozen_params:
            for name in self._frozen():
                state.pop(name, None)
        if submodules:
            state = self._below(submodules, state)
        return self._handed_out(state)

    def _live(self) -> dict[str, tuple[str, Any]]:
        """Return key and value of everything in the model, by the user's names."""
        found: dict[str, tuple[str, Any]] = {}
        for key, value in original_method(self._model.state_dict)().items():
            name = self._names.of_key(key)
            if name in found:
                both = f"{found[name][0]!r} and {key!r} are both {name!r}"
                raise UsageError("two entries of a model have the same name", seen=both)
            found[name] = key, value
        return found

    def _frozen(self) -> set[str]:
        places = self._names.of_parameter.items()
        return {name for p, names in places if not p.requires_grad for name in names}

    def _below(self, submodules: Iterable[nn.Module], state: State) -> State:
        found: State = {}
        keep = self._options.keep_submodule_prefixes
        for prefix in map(self._names.prefix_of, submodules):
            for name, value in state.items():
                if name.startswith(prefix):
                    found[name if keep else name.removeprefix(prefix)] = value
        return found

    def _handed_out(self, state: State) -> State:
        """Gather tensors, and move them, as the options want."""
        full, offload = self._options.full_state_dict, self._options.cpu_offload
        kept = not (full and offload) or self._ranks.rank == 0

        def handed(path: Path, value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if full and isinstance(value, DTensor):
                value = value.full_tensor()
            return (value.cpu() if offload else value) if kept else None

        made = each_leaf(state, handed)
        return made if kept else {}

    @torch.no_grad()
    def optimizer_state(
        self, optimizers: Optimizers, submodules: Iterable[nn.Module] | None
    ) -> State:
        """Return the optimizers' state."""
        states: State = {}
        groups: list[State] = []
        taken: set[str] = set()
        for optimizer in as_tuple(optimizers):
            self._check_not_sharded(optimizer)
            optimizer_state, local = self._state_of(optimizer), _local_of(optimizer)
            mine = _parameters_of(local)
            for group, packed in zip(
                optimizer.param_groups, optimizer_state["param_groups"], strict=True
            ):
                names = [self._names_of(p)[0] for p in group["params"]]
                if taken.intersection(names) or len(set(names)) < len(names):
                    twice = min(taken.intersection(names) or names)
                    raise UsageError("a parameter is in two optimizers or groups", seen=f"{twice}")
                taken.update(names)
                for name, p, number in zip(names, group["params"], packed["params"], strict=True):
                    state = optimizer_state["state"].get(number)
                    if not state and p.requires_grad and p in mine:
                        state = fresh_state(local, group, p)
                    if state:
                        states[name] = state
                groups.append(options_of(packed) | {"params": names})
        if submodules:
            states = self._below(submodules, states)
            named = {name: name for group in groups for name in group["params"]}
            kept = {old: new for new, old in self._below(submodules, named).items()}
            for group in groups:
                group["params"] = [kept[name] for name in group["params"] if name in kept]
        made: State = {"state": states, "param_groups": groups}
        if self._options.flatten_optimizer_state_dict:
            made = flattened(made)
        return self._handed_out(made)

    def _check_not_sharded(self, optimizer: torch.optim.Optimizer) -> None:
        if self._options.full_state_dict and is_sharded(optimizer):
            raise UsageError(
                "no rank has all of a sharded optimizer's state",
                seen=f"full_state_dict=True for a {type(optimizer).__qualname__}",
                fix="Leave out full_state_dict: each rank has the state of its parameters, and "
                "save writes all. Or call optimizer.consolidate_state_dict(to=0) on all ranks, and "
                "optimizer.state_dict() on rank 0.",
            )

    def _state_of(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        sharded: Any = optimizer
        take = sharded.local_state_dict if is_sharded(optimizer) else optimizer.state_dict
        optimizer_state = original_method(take)()
        besides = optimizer_state.keys() - {"state", "param_groups"}
        if besides:
            raise UsageError(
                "an optimizer has state beside that of its parameters",
                seen=f"a {type(optimizer).__qualname__} has {sorted(besides)}",
                fix="Give the optimizer itself to save and load.",
            )
        return optimizer_state

    def _names_of(self, parameter: nn.Parameter) -> list[str]:
        try:
            return self._names.of_parameter[parameter]
        except KeyError:
            raise UsageError(
                "an optimizer has a parameter that the model has not",
                seen=f"one of shape {list(parameter.shape)}",
                fix="Make the optimizer of the model's parameters after it was sharded.",
            ) from None

    # Putting back.

    @torch.no_grad()
    def set_model(self, given: Mapping[Any, Any]) -> IncompatibleKeys:
        """Put the model's state back."""
        live = self._live()
        state: State = {}
        for name, value in given.items():
            if isinstance(name, nn.Module):
                prefix = self._names.prefix_of(name)
                state |= {prefix + inner: entry for inner, entry in value.items()}
            else:
                state[name] = value

        def like(path: Path) -> Any:
            return live[path[0]][1] if path[0] in live else None

        state = self._received("set_model_state_dict", state, like)
        offloaded = {
            name
            for parameter, names in self._names.of_parameter.items()
            if parameter.is_meta and hasattr(parameter, "_dure_on_host")  # CPUOffloadPolicy
            for name in names
        }
        passed: State = {}
        for name, value in state.items():
            found = cut_like(value, like((name,)))
            key = live[name][0] if name in live else name
            passed[key] = on_host(found) if name in offloaded else found
        if self._options.ignore_frozen_params:
            for name in self._frozen() & live.keys() - state.keys():
                passed[live[name][0]] = live[name][1]
        assign = any(isinstance(v, torch.Tensor) and v.is_meta for _, v in live.values())
        try:
            load = original_method(self._model.load_state_dict)
            keys = load(passed, strict=self._options.strict, assign=assign)
        except UsageError:
            raise
        except RuntimeError as e:
            raise CheckpointMismatch("the model does not take the state", seen=f"{e}") from e
        missing = [self._names.of_key(key) for key in keys.missing_keys]
        return IncompatibleKeys(missing, list(keys.unexpected_keys))

    @torch.no_grad()
    def set_optimizers(self, optimizers: Optimizers, given: Mapping[str, Any]) -> IncompatibleKeys:
        """Put the optimizers' state back."""
        several = as_tuple(optimizers)
        own = {
            name: (p, optimizer.state.get(p, {}))
            for optimizer in several
            for group in optimizer.param_groups
            for p in group["params"]
            for name in self._names_of(p)
        }

        def like(path: Path) -> Any:
            if path[0] != "state" or path[1] not in own:
                return None
            parameter, state = own[path[1]]
            return state.get(path[2], parameter)

        nested = dict(given)
        if nested and "state" not in nested:
            nested = nested_state(nested, own.keys())
        nested = self._received("set_optimizer_state_dict", nested, like)
        states = cast(dict[str, State], nested.get("state", {}))
        options = {
            name: options_of(group)
            for group in nested.get("param_groups", [])
            for name in group["params"]
        }
        missing: list[str] = []
        loading: list[tuple[torch.optim.Optimizer, State]] = []
        for optimizer in several:
            optimizer_state, local = self._state_of(optimizer), _local_of(optimizer)
            mine = _parameters_of(local)
            loading.append((optimizer, optimizer_state))
            number = 0
            for group, packed in zip(
                optimizer.param_groups, optimizer_state["param_groups"], strict=True
            ):
                found: list[tuple[str, State]] = []
                for parameter in group["params"]:
                    names = self._names_of(parameter)
                    name = next((n for n in names if n in states or n in options), names[0])
                    if name in options:
                        found.append((name, options[name]))
                    state = states.get(name)
                    if not parameter.requires_grad:
                        optimizer_state["state"].pop(number, None)
                    elif state is not None:
                        optimizer_state["state"][number] = {
                            key: cut_like(value, like(("state", name, key)))
                            for key, value in state.items()
                        }
                    elif parameter in mine and (
                        optimizer.state.get(parameter) or fresh_state(local, group, parameter)
                    ):
                        missing.append(name)
                    number += 1
                packed.update(self._common(found))
        if missing and self._options.strict:
            raise CheckpointMismatch(
                f"Missing optimizer state for parameter {missing[0]!r}",
                seen=f"{len(missing)} have none",
                fix="With strict=False they keep theirs, or begin at their first step.",
            )
        for optimizer, optimizer_state in loading:
            original_method(optimizer.load_state_dict)(optimizer_state)
        return IncompatibleKeys(missing, sorted((states.keys() | options.keys()) - own.keys()))

    def _common(self, found: list[tuple[str, State]]) -> State:
        """Return the options that the parameters of one group had."""
        if not found:
            return {}
        first, options = found[0]
        for name, others in found[1:]:
            differ = [k for k in options.keys() | others.keys() if options.get(k) != others.get(k)]
            if differ and self._options.strict:
                raise CheckpointMismatch(
                    "parameters of one group had different options",
                    seen=f"{min(differ)!r} was {options.get(min(differ))} for {first!r}, "
                    f"{others.get(min(differ))} for {name!r}",
                    fix="With strict=False the group takes those of its first parameter.",
                )
        return options

    def _received(self, op: str, given: State, like: Callable[[Path], Any]) -> State:
        """Return rank 0's state on all ranks, cut as `like` returns; else `given`.

        This rank does not keep entries for which `like` returns None.
        """
        group = self._ranks.group
        if not self._options.broadcast_from_rank0 or group is None:
            return given
        # These ranks' errors name the function.
        return from_rank_0(Ranks(None, op), group, given, like, self._device)

    def _device(self, like: Any) -> torch.device:
        """Return where a tensor is received; the model's device where it is of another's rank."""
        for tensor in (like, *self._names.of_parameter):
            if isinstance(tensor, DTensor):
                return torch.device(tensor.device_mesh.device_type)
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                return tensor.device
        return torch.device("cpu")


def as_tuple(optimizers: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    """Return one optimizer, or several, as a tuple."""
    one = isinstance(optimizers, torch.optim.Optimizer)
    return (optimizers,) if one else tuple(optimizers)


def _local_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return what updates this rank's parameters: of a sharded optimizer the one within."""
    sharded: Any = optimizer
    return sharded.optim if is_sharded(optimizer) else optimizer


def _parameters_of(optimizer: torch.optim.Optimizer) -> set[torch.Tensor]:
    return {p for group in optimizer.param_groups for p in group["params"]}
