"""Ranks of a group as text: short for any number of ranks, different for different ranks."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

__all__ = ["listed_ranks", "name_of_ranks"]

_LISTED = 64
"""How many ranks a text lists; of more than these the `_ENDS` first and last ones."""

_ENDS = 8


def listed_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as a list; of many, the first and last ones, how many, and a digest.

    Example:
        >>> listed_ranks([0, 2])
        '[0, 2]'
    """
    if len(ranks) <= _LISTED:
        return str(list(ranks))
    first, last = (", ".join(map(str, some)) for some in (ranks[:_ENDS], ranks[-_ENDS:]))
    return f"[{first}, ..., {last}] ({len(ranks)} ranks, digest {_digest(ranks)})"


def name_of_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as a part of a name; of many, the first and last one, how many, and a digest.

    Example:
        >>> name_of_ranks([0, 2])
        '0-2'
    """
    if len(ranks) <= _LISTED:
        return "-".join(map(str, ranks))
    return f"{ranks[0]}-to-{ranks[-1]}-of-{len(ranks)}-{_digest(ranks)}"


def _digest(ranks: Sequence[int]) -> str:
    return hashlib.blake2b(array("q", ranks).tobytes(), digest_size=16).hexdigest()
