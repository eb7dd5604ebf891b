"""State as JSON and tensors, and back, without pickle: reading a file runs no code of its author.

What `state_dict` returns is a tree of Python values with tensors as leaves. The tensors are taken
out and named by their path (``model.layers.0.weight``); the rest becomes JSON. JSON's own types
are kept; everything else is an object with a kind and a value:

    {"$": "tensor", "v": "optimizer.state.0.exp_avg"}     {"$": "tuple", "v": [...]}
    {"$": "map", "v": [[key, value], ...]}                 dicts whose keys are not plain strings
    {"$": "ordered", "v": [...], "versions": {...}}        a module's state, and its formats
    {"$": "fields", "v": [[name, value], ...]}             an instance of a dataclass

Two leaves that are one tensor (tied weights) get one name, so its bytes are stored once. A type
that is not in the tables below is refused by the path at which it was found. Ranks that have parts
of a state merge their trees: a dict has the keys of all ranks. A list or tuple that is entered (see
below) is merged item by item if it has the same length on all ranks. Otherwise it is a value, and
of values that differ the first rank's is kept.

A state is also one level of names, as torch names it (`flatten`). Dicts are always entered; lists
and tuples where there is a tensor, a dict or a list of such in them. All else is a value.

An instance of a dataclass is stored as its fields (dataclass_fields.py).
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, cast

import torch

from dure.checkpoint.dataclass_fields import (
    fields_of,
    is_of_fields,
    is_within_itself,
    others_of,
    with_fields,
    within,
)
from dure.checkpoint.values import PLAIN, VALUES, decode_value, encode_value
from dure.errors import CheckpointMismatch, DureError, UsageError
from dure.tensor import DTensor

__all__ = [
    "ABSENT",
    "Index",
    "Keys",
    "Leaf",
    "Named",
    "decode",
    "encode",
    "encode_state",
    "entries_of",
    "flatten",
    "merged",
    "names_in",
    "put",
    "require_dense",
    "tensor_node",
    "without_marks",
]

Path = tuple[Any, ...]
Keys = tuple[str, ...]
"""Keys of a tree, as text."""

ABSENT: Any = object()
"""Stands for a node that one of two trees does not have."""
_NO_ELEMENTS = "empty"
"""The field of the node of a tensor of which this rank has no elements, though others have."""


class Index(int):
    """A key that is a place in a list, and no key of a dict."""


class Named(str):
    """Stands for the tensor that a file has under this name."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor or value in a nested state, and the keys that lead to it."""

    path: Path
    value: Any


def encode(value: object, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Turn `value` into JSON's types; put the tensors in it into `tensors`, by name.

    Names are the keys and indices that lead to a tensor, with dots between, behind `path`.

    Raises:
        UsageError: There is something that cannot be saved; the message names its path.
    """
    return _Encoder(tensors).encode(value, path)


def encode_state(
    state: Mapping[Any, Any],
    tensors: dict[str, torch.Tensor],
    within_key: Callable[[Any, str], bool] | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Encode a dict as `encode` does; also return the dict's key for each tensor.

    A tensor for whose key and name `within_key` is true is not tied to tensors below other keys.
    """
    encoder, key_of = _Encoder(tensors, within_key), dict[str, Any]()

    def encoded(key: Any, value: Any) -> Any:
        encoder.key = key
        node = encoder.encode(value, str(key))
        key_of.update(dict.fromkeys(islice(tensors, len(key_of), None), key))
        return node

    if all(_is_plain(key) for key in state):
        return {key: encoded(key, value) for key, value in state.items()}, key_of
    pairs = [[encoder.hashed(key, "(key)"), encoded(key, v)] for key, v in state.items()]
    return _tagged("map", pairs), key_of


class _Found(NamedTuple):
    """A tensor, where it was found."""

    tensor: torch.Tensor
    key: Any
    """Of the state."""
    path: str


class _Encoder:
    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        within_key: Callable[[Any, str], bool] | None = None,
    ) -> None:
        self._tensors, self._within_key = tensors, within_key
        self._found_at: dict[object, dict[str, _Found]] = {}
        """Tensors by address, shape and dtype, and by name."""
        self._is_hashed = False
        """Whether the value is a key or an element of a set, or inside one: a dict cannot be
        hashed."""
        self._around: list[int] = []
        """Instances of dataclasses that the value is in, by id."""
        self.key: Any = None
        """The dict's key that is being encoded."""

    def encode(self, value: object, path: str) -> Any:
        if value is None or type(value) in PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, Mapping):
            return self._mapping(cast(Mapping[object, object], value), path)
        if type(value) in _SEQUENCES and not _holds_tensors_without_order(value):
            kind = _SEQUENCES[type(value)]
            encode = self.hashed if kind in ("set", "frozenset") else self.encode
            items = [encode(v, within(path, i)) for i, v in enumerate(_ordered(value))]
            return items if kind == "list" else _tagged(kind, items)
        fields = None if self._is_hashed else fields_of(value)
        if fields is not None:
            if id(value) in self._around:
                raise is_within_itself(value, path)
            self._around.append(id(value))
            names = fields.items()
            pairs = [[k, self.encode(v, within(path, k))] for k, v in names]
            self._around.pop()
            return _tagged("fields", pairs)
        if is_of_fields(value) and (others := others_of(value)):
            kind = type(value)
            raise UsageError(
                "a dataclass cannot be saved in a checkpoint",
                seen=f"{path} is a {kind.__qualname__} with {others[0]!r}, which is not a field",
                fix="Make it a field, or save dataclasses.asdict(...) of the instance.",
            )
        found = encode_value(value, path)
        return value if found is None else _tagged(*found)

    def hashed(self, value: object, path: str) -> Any:
        """Encode a key, or an element of a set."""
        before, self._is_hashed = self._is_hashed, True
        try:
            return self.encode(value, path)
        finally:
            self._is_hashed = before

    def _mapping(self, value: Mapping[Any, Any], path: str) -> Any:
        kind = _MAPPINGS.get(type(value), "map")
        if kind == "map" and all(_is_plain(key) for key in value):
            return {cast(str, k): self.encode(v, within(path, k)) for k, v in value.items()}
        pairs = [
            [self.hashed(k, within(path, "(key)")), self.encode(v, within(path, k))]
            for k, v in value.items()
        ]
        tagged = _tagged(kind, pairs)
        versions = getattr(value, "_metadata", None)  # what torch's modules say of their formats
        if kind == "ordered" and isinstance(versions, Mapping):
            plain_dict = dict(cast(Mapping[object, object], versions))
            tagged["versions"] = self.encode(plain_dict, within(path, "(versions)"))
        if isinstance(value, defaultdict):
            tagged["factory"] = _name_of_factory(value.default_factory, path)
        return tagged

    def _tensor(self, tensor: torch.Tensor, path: str) -> Any:
        require_dense(path, tensor)
        if not isinstance(tensor, DTensor):
            tensor = tensor.detach()
        held = _held(tensor)
        found, place = _Found(tensor, self.key, path), (held.data_ptr(), held.shape, held.dtype)
        others = self._found_at.setdefault(place, {}) if held.numel() else {}
        name = next((name for name, it in others.items() if self._are_tied(it, found)), None)
        if name is None:
            name = path
            while name in self._tensors:  # "a.b" the key, and "b" within "a"
                name += "'"
            self._tensors[name], others[name] = tensor, found
        node = tensor_node(name)
        if not held.numel() and tensor.numel():
            node[_NO_ELEMENTS] = True
        return node

    def _are_tied(self, first: _Found, second: _Found) -> bool:
        """Return whether two tensors of one address, shape and dtype are one."""
        keys = {
            it.key if self._within_key and self._within_key(it.key, it.path) else None
            for it in (first, second)
        }
        return len(keys) == 1 and _is_same(first.tensor, second.tensor)


def _held(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.part if isinstance(tensor, DTensor) else tensor


def _is_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors of one address, shape and dtype have the same values."""
    cuts = [
        (t.spec.shape, t.spec.placements, id(t.spec.mesh)) if isinstance(t, DTensor) else None
        for t in (first, second)
    ]
    one, other = _held(first), _held(second)
    return (
        cuts[0] == cuts[1]
        and one.device == other.device
        and one.stride() == other.stride()
        and not any(t.is_conj() or t.is_neg() for t in (one, other))
    )


def require_dense(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose values are not in memory as its shape says.

    Raises:
        UsageError: It is not dense, quantised, or has no values.
    """
    held = _held(tensor)
    if held.layout != torch.strided or held.is_quantized or held.is_meta:
        raise UsageError(
            "a tensor cannot be in a checkpoint",
            seen=f"{name} is {held.layout}, {held.dtype}, on {held.device}",
            fix="Save and load dense tensors that have values; to_empty() makes them of meta ones.",
        )


def tensor_node(name: str) -> dict[str, Any]:
    """Return the node that represents the tensor of that name."""
    return _tagged("tensor", name)


def _tagged(kind: str, value: Any) -> dict[str, Any]:
    return {"$": kind, "v": value}


def _is_plain(key: object) -> bool:
    """Return whether a key of a dict can be one of a JSON object."""
    return type(key) is str and key != "$"


def _name_of_factory(factory: object, path: str) -> str | None:
    for name, known in _FACTORIES.items():
        if factory is known:
            return name
    raise UsageError(
        "a value cannot be saved in a checkpoint",
        seen=f"{path} is a defaultdict whose values are made by {factory!r:.60}",
        fix=f"Save dict(...) of it, or use one of {', '.join(filter(None, _FACTORIES))}.",
    )


def _holds_tensors_without_order(value: object) -> bool:
    unordered = isinstance(value, set | frozenset)
    return unordered and any(isinstance(v, torch.Tensor) for v in cast(set[object], value))


_SEQUENCES: dict[type, str] = {
    list: "list",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    torch.Size: "size",
}
_MAPPINGS: dict[type, str] = {
    OrderedDict: "ordered",
    Counter: "counter",
    defaultdict: "defaultdict",
}
_FACTORIES: dict[str | None, type | None] = {
    None: None,
    **{kind.__name__: kind for kind in (bool, bytes, dict, float, int, list, set, str, tuple)},
}
_KINDS_OF_MAPPINGS = ("map", "fields", *_MAPPINGS.values())


def _ordered(value: object) -> list[object]:
    """List a sequence; a set in an order that does not change from run to run."""
    items = list(cast(list[object], value))
    return sorted(items, key=repr) if isinstance(value, set | frozenset) else items


def merged(
    first: Any, second: Any, note: Callable[[Keys, Any, Any], None] | None = None, keys: Keys = ()
) -> Any:
    """Return the tree of a state that two ranks have parts of.

    Args:
        first: The tree of the first rank. Where values differ, its value is kept.
        second: That of the other rank.
        note: Called with the keys, and both nodes, at which they differ; `ABSENT` for a node that
            only one of them has.
        keys: The keys that lead to both.

    Raises:
        CheckpointMismatch: One tree has a tensor, or a dict or list with tensors, where the other
            has something else.
    """
    if first == second:
        return first
    kinds = _kind(first), _kind(second)
    if kinds == ("tensor", "tensor"):
        # A rank without elements of a DTensor cannot know whether it is tied to another.
        known = second if first.get(_NO_ELEMENTS) else first
        if known is first and not second.get(_NO_ELEMENTS) and note:
            note(keys, first, second)
        return known
    one, other = _items(first), _items(second)
    if kinds[0] == kinds[1] and one is not None and other is not None:
        if len(one) == len(other) and any(map(_is_entered, (*one, *other))):
            pairs = enumerate(zip(one, other, strict=True))
            both = [merged(a, b, note, (*keys, str(i))) for i, (a, b) in pairs]
            return both if kinds[0] is None else {**first, "v": both}
    elif not all(kind in _KINDS_OF_MAPPINGS for kind in kinds):
        if names_in([first, second]):
            raise CheckpointMismatch(
                "a name is a tensor on some ranks, and a value on others", seen=f"{_dotted(keys)!r}"
            )
    else:
        return _merged_mappings([first, second], note, keys)
    if note:
        note(keys, first, second)
    return first


def _merged_mappings(
    pair: list[dict[str, Any]], note: Callable[[Keys, Any, Any], None] | None, keys: Keys
) -> Any:
    entries, others = map(_entries, pair)
    for key, (original, value) in others.items():
        own, inner = entries.get(key), (*keys, str(original))
        if own is None and note:
            note(inner, ABSENT, value)
        both = value if own is None else merged(own[1], value, note, inner)
        entries[key] = original, both
    for key, (original, value) in entries.items():
        if key not in others and note:
            note((*keys, str(original)), value, ABSENT)
    tagged = [node for node in pair if "$" in node]
    if not tagged:
        return dict(entries.values())
    return {**tagged[-1], **tagged[0], "v": [list(entry) for entry in entries.values()]}


def _dotted(keys: Keys) -> str:
    return ".".join(keys)


def _items(node: Any) -> list[Any] | None:
    """Return the items of a list or tuple; None: it is neither."""
    if isinstance(node, list):
        return cast(list[Any], node)
    return node["v"] if _kind(node) == "tuple" else None


def _is_entered(node: Any) -> bool:
    """Return whether `flatten` enters a list because of this item."""
    items = _items(node)
    if items is not None:
        return any(map(_is_entered, items))
    return _kind(node) in ("tensor", *_KINDS_OF_MAPPINGS)


def names_in(node: Any) -> frozenset[str]:
    """Return the names of the tensors in a tree."""
    found: set[str] = set()
    waiting: list[Any] = [node]
    while waiting:
        here = waiting.pop()
        if isinstance(here, list):
            waiting += cast(list[Any], here)
        elif isinstance(here, dict):
            fields = cast(dict[str, Any], here)
            if fields.get("$") == "tensor":
                found.add(fields["v"])
            else:
                waiting += fields.values()
    return frozenset(found)


def without_marks(node: Any) -> Any:
    """Return a tree without the fields that only `merged` needs."""
    if isinstance(node, list):
        return [without_marks(item) for item in cast(list[Any], node)]
    if not isinstance(node, dict):
        return node
    fields = cast(dict[str, Any], node)
    if fields.get("$") == "tensor":
        return tensor_node(fields["v"])
    return {key: without_marks(inner) for key, inner in fields.items()}


def _kind(node: Any) -> str | None:
    """Return what kind of thing a node is; None: one of JSON's that is no object."""
    return cast(dict[str, Any], node).get("$", "map") if isinstance(node, dict) else None


def _entries(mapping: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    pairs = mapping["v"] if "$" in mapping else mapping.items()
    return {repr(key): (key, value) for key, value in pairs}


def entries_of(tree: Any) -> list[tuple[Any, Any]]:
    """Return the keys and nodes of a tree that is a mapping; nothing of another one."""
    return list(_entries(tree).values()) if _kind(tree) in _KINDS_OF_MAPPINGS else []


def decode(
    node: Any, tensor_of: Callable[[str], Any], fields_as: Callable[[Any], Any] = dict
) -> Any:
    """Turn what `encode` returned back into values.

    Args:
        node: What `encode` returned.
        tensor_of: Gives what is at a tensor's name.
        fields_as: Builds what replaces a dataclass instance, from its names and values.

    Raises:
        ValueError: The JSON is not what `encode` makes; the message names the place.
    """
    try:
        return _decoded(node, tensor_of, fields_as)
    except DureError:  # of `tensor_of`
        raise
    except _FAULTS as e:
        path, fault = _fault_of(node, tensor_of, e)
        raise ValueError(f"{path!r} is not as it was saved: {fault}") from e


_FAULTS = ValueError, KeyError, TypeError, AttributeError, OverflowError, RuntimeError


def _fault_of(
    node: Any, tensor_of: Callable[[str], Any], error: BaseException, path: str = ""
) -> tuple[str, str]:
    """Return the path of the innermost node that cannot be decoded, and why."""
    for key, inner in _children(node):
        try:
            _decoded(inner, tensor_of, dict)
        except _FAULTS as e:
            return _fault_of(inner, tensor_of, e, within(path, key))
    return path, f"{type(error).__name__}: {error}"


def _children(node: Any) -> list[tuple[Any, Any]]:
    if isinstance(node, dict):
        fields = cast(dict[str, Any], node)
        if "$" not in fields:
            return list(fields.items())
        value = fields.get("v")
        if fields["$"] in _KINDS_OF_MAPPINGS and isinstance(value, list):
            pairs = cast(list[list[Any]], value)
            return [(it[0], it[1]) for it in pairs if isinstance(it, list) and len(it) == 2]
        node = value if fields["$"] in _SEQUENCES.values() else None
    return list(enumerate(cast(list[Any], node))) if isinstance(node, list) else []


def _decoded(node: Any, tensor_of: Callable[[str], Any], fields_as: Callable[[Any], Any]) -> Any:
    if isinstance(node, list):
        return [_decoded(item, tensor_of, fields_as) for item in cast(list[Any], node)]
    if not isinstance(node, dict):
        return node
    fields = cast(dict[str, Any], node)
    if "$" not in fields:
        return {key: _decoded(item, tensor_of, fields_as) for key, item in fields.items()}
    kind, value = fields["$"], fields["v"]
    if kind == "tensor":
        return tensor_of(value)
    if kind in VALUES:
        return decode_value(kind, value)
    if not isinstance(value, list):
        raise TypeError(f"expected a list, got a {type(value).__name__}")
    make = fields_as if kind == "fields" else _FROM_ITEMS[kind]
    inner = [_decoded(item, tensor_of, fields_as) for item in cast(list[Any], value)]
    if kind in _KINDS_OF_MAPPINGS and not all(isinstance(item, list) for item in inner):
        raise TypeError("expected pairs of keys and values")
    made = make(inner)
    if "versions" in fields:
        made._metadata = _decoded(fields["versions"], tensor_of, fields_as)
    if kind == "defaultdict":
        made.default_factory = _FACTORIES[fields["factory"]]
    return made


_FROM_ITEMS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "size": torch.Size,
    "map": dict,
    "ordered": OrderedDict,
    "counter": lambda pairs: Counter(dict(pairs)),
    "defaultdict": lambda pairs: defaultdict(None, pairs),
}


def flatten(state: Mapping[Any, Any]) -> dict[str, Leaf]:
    """Return the leaves of a nested state by name.

    Raises:
        UsageError: Two have the same name.
    """
    found: dict[str, Leaf] = {}
    _enter((), state, found)
    return found


def _enter(path: Path, value: Any, found: dict[str, Leaf], around: tuple[int, ...] = ()) -> None:
    is_leaf = isinstance(value, torch.Tensor)  # by far the most, so they are looked at no further
    if not is_leaf and isinstance(value, Mapping):
        items = cast(Mapping[Any, Any], value).items()
    elif not is_leaf and (fields := fields_of(value)) is not None:
        if id(value) in around:
            raise is_within_itself(value, ".".join(map(str, path)))
        items, around = fields.items(), (*around, id(value))
    elif is_leaf or _is_value(value):
        name = ".".join(map(str, path))
        if name in found:
            raise UsageError(
                "two entries of a state have the same name",
                seen=f"{name!r} is {list(found[name].path)} and {list(path)}",
                fix="Let no key have a dot where the rest of the name is that of another.",
            )
        found[name] = Leaf(path, value)
        return
    else:
        items = ((Index(i), inner) for i, inner in enumerate(cast(list[Any], value)))
    for key, inner in items:
        _enter((*path, key), inner, found, around)


def _is_value(value: Any, within: bool = False) -> bool:
    """Return whether nothing in it is entered; `within` a list, a tensor is."""
    if isinstance(value, Mapping):
        return False
    if not isinstance(value, list | tuple):
        return fields_of(value) is None and (
            not within or not isinstance(value, torch.Tensor | Named)
        )
    return all(_is_value(inner, within=True) for inner in cast(list[Any], value))


def put(state: Any, path: Path, value: Any) -> Any:
    """Put a value where a leaf of that path was; return `state`, or the object that replaces it.

    Tuples and frozen dataclasses are replaced.
    """
    key, *rest = path
    fields = fields_of(state)
    if rest:
        value = put((state if fields is None else fields)[key], tuple(rest), value)
    if fields is not None:
        return with_fields(state, {key: value})
    if isinstance(state, tuple):
        before, after = cast(Path, state[:key]), cast(Path, state[key + 1 :])
        return (*before, value, *after)
    state[key] = value
    return state
