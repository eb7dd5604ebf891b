"""The JSON of etcd's requests and answers, as its gateway has it: keys and values in base64."""

from __future__ import annotations

import base64
from typing import Any, NamedTuple

__all__ = [
    "Json",
    "KeyValue",
    "decode",
    "delete",
    "encode",
    "has_revision",
    "has_value",
    "keys_below",
    "put",
    "range_below",
]

Json = dict[str, Any]


class KeyValue(NamedTuple):
    """A key's value, the revision of its last change, and its lease; 0: none."""

    revision: int
    value: bytes
    lease: int = 0


def encode(text: str | bytes) -> str:
    """Write bytes as the gateway expects them."""
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def decode(text: str) -> bytes:
    """Read bytes as the gateway writes them."""
    return base64.b64decode(text)


def put(key: str, value: bytes, lease: int = 0) -> Json:
    """Return the step of a transaction that writes a value; a key with a lease ends with it."""
    return {"request_put": {"key": encode(key), "value": encode(value), "lease": str(lease)}}


def delete(key: str) -> Json:
    """Return the step of a transaction that deletes a key."""
    return {"request_delete_range": {"key": encode(key)}}


def has_value(key: str, value: bytes) -> Json:
    """Return the condition of a transaction that a key has a value."""
    return {"target": "VALUE", "result": "EQUAL", "key": encode(key), "value": encode(value)}


def has_revision(key: str, revision: int) -> Json:
    """Return the condition that a key was last changed at `revision`; 0: that it does not exist."""
    return {"target": "MOD", "result": "EQUAL", "key": encode(key), "mod_revision": str(revision)}


def range_below(prefix: str) -> Json:
    """Return the range of all keys that begin with `prefix`, which must not end in 0xff."""
    first = prefix.encode()
    return {"key": encode(first), "range_end": encode(first[:-1] + bytes([first[-1] + 1]))}


def keys_below(prefix: str, answer: Json) -> dict[str, KeyValue]:
    """Return the keys of an answer to a range request, without the prefix that all of them have."""
    return {
        decode(found["key"]).decode().removeprefix(prefix): KeyValue(
            int(found["mod_revision"]), decode(found.get("value", "")), int(found.get("lease", 0))
        )
        for found in answer.get("kvs", ())
    }
