"""Row 4: what a rank does, sends and receives when a state of 1,000 tensors is saved.

Every rank has a row of 990 tensors, and a copy of 10 more. The messages of one rank are made and
measured as in a save; those of the other ranks differ from them in the numbers of rows only. Rank 0
divides what all have and makes the text of the manifest. No file is written.
"""

from __future__ import annotations

import pickle
import statistics
import time

import numpy as np
from counting import resident_mb

from dure.checkpoint.catalog import Manifest, sealed
from dure.checkpoint.planning import (
    Description,
    Known,
    Offer,
    Written,
    described,
    digest_of,
    parts_of,
)
from dure.checkpoint.replicas import ALIKE, MARKED
from dure.checkpoint.slice_files import FileLayout, TensorKind
from dure.checkpoint.slices import Box
from dure.checkpoint.tree import tensor_node

TITLE = "a save of 1,000 tensors: plan and manifest"
RANKS = (16, 256, 1024, 10_000)
NUM_ROWS, NUM_COPIES = 990, 10
_REPEATS = 5


def offer_of(rank: int, ranks: int) -> Offer:
    """Return what a rank has."""
    rows = TensorKind("F32", (ranks, 64)), (Box((rank, 0), (1, 64)),), 0
    copies = TensorKind("F32", (64,)), (Box((0,), (64,)),), MARKED | ALIKE
    offer: Offer = {f"layers.{n}.weight": rows for n in range(NUM_ROWS)}
    return offer | {f"layers.{n}.bias": copies for n in range(NUM_COPIES)}


def descriptions_of(ranks: int) -> list[Description]:
    """Return what all ranks send; rows are the first of the four numbers of each box."""
    skeleton, boxes = described(offer_of(0, ranks))
    found: list[Description] = []
    for rank in range(ranks):
        numbers = np.frombuffer(boxes, np.int64).copy()
        numbers[: 4 * NUM_ROWS : 4] = rank
        found.append(Description(skeleton if rank == 0 else b"", numbers.tobytes()))
    return found


def measure(ranks: int) -> dict[str, float]:
    """Measure one rank, then rank 0."""
    marks = np.arange(NUM_COPIES, dtype=np.uint32).tobytes()
    sent = descriptions_of(ranks)
    skeleton = digest_of(sent[0].skeleton)
    keys = [(skeleton, digest_of(one.boxes)) for one in sent]
    began = time.perf_counter()
    known = Known()
    lacks = known.lacks(keys)
    division, _ = known.division(keys, sent, [marks] * ranks)
    planned_s = time.perf_counter() - began
    counts = [len(positions) for positions in division.positions]
    written = [Written(256 * count, bytes(4 * count)) for count in counts]
    tree = {f"layers.{n}.weight": tensor_node(f"layers.{n}.weight") for n in range(NUM_ROWS)}
    began = time.perf_counter()
    files = {f"part-000001-{rank:05d}.safetensors": it.num_bytes for rank, it in enumerate(written)}
    text = sealed(Manifest(tree, division.texts(written, 1), files))
    written_s = time.perf_counter() - began
    rank = ranks - 1
    up = (keys[rank], marks, sent[rank], written[rank])
    down = lacks[rank], division.positions[rank].astype(np.int32)
    return {
        "one rank plans, ms": own_ms(rank, ranks, division.positions[rank].tolist()),
        "one rank sends, bytes": len(pickle.dumps(up)),
        "one rank receives, bytes": len(pickle.dumps(down)),
        "most slices of a rank": max(counts),
        "fewest slices of a rank": min(counts),
        "rank 0 plans, s": planned_s,
        "rank 0 makes the manifest, s": written_s,
        "manifest, MB": len(text) / 1e6,
        "rank 0, resident MB": resident_mb(),
    }


def own_ms(rank: int, ranks: int, positions: list[int]) -> float:
    """Return how long a rank describes what it has, and lays out its file."""
    offer, times = offer_of(rank, ranks), list[float]()
    kinds = {name: kind for name, (kind, _, _) in offer.items()}
    for _ in range(_REPEATS):
        began = time.perf_counter()
        for data in described(offer):
            digest_of(data)
        parts = parts_of(offer)
        FileLayout.of([parts[position] for position in positions], kinds)
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)
