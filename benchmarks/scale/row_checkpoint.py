"""Row 4: what a rank does, sends and receives when a state of 1,000 tensors is saved.

Every rank has a row of 990 tensors, and a copy of 10 more. The messages of one rank are made and
measured as in a save; those of the other ranks differ from them in the numbers of rows only. Rank 0
divides what all have and makes the text of the manifest, of which a rank finds its own slices. The
manifest alone is written.
"""

from __future__ import annotations

import pickle
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from counting import resident_mb

from dure.checkpoint.catalog import NAME, Manifest, catalog_of, sealed
from dure.checkpoint.planning import (
    Description,
    Known,
    Offer,
    described,
    digest_of,
    parts_of,
)
from dure.checkpoint.replicas import ALIKE, MARKED
from dure.checkpoint.slice_files import FileLayout, FileRecord, TensorKind
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
    written = {r: FileRecord(256 * n, 100 * n, r) for r, n in enumerate(counts)}
    tree = {f"layers.{n}.weight": tensor_node(f"layers.{n}.weight") for n in range(NUM_ROWS)}
    began = time.perf_counter()
    text = sealed(Manifest(tree, 1, "0" * 32, written, division.text))
    written_s = time.perf_counter() - began
    rank = ranks - 1
    header, own_ms = planned(rank, ranks, division.positions[rank].tolist())
    up = (keys[rank], marks, sent[rank], written[rank])
    down = lacks[rank], division.positions[rank].astype(np.int32)
    return {
        "one rank plans, ms": own_ms,
        "one rank sends, bytes": len(pickle.dumps(up)),
        "one rank receives, bytes": len(pickle.dumps(down)),
        "most slices of a rank": max(counts),
        "fewest slices of a rank": min(counts),
        "rank 0 plans, s": planned_s,
        "rank 0 makes the manifest, s": written_s,
        "MB of manifest": len(text) / 1e6,
        "MB of all descriptions": (len(text) + header * ranks) / 1e6,
        "bytes of the manifest that a rank reads for its own slices": len(text) + header,
        "one rank finds its own slices, ms": found_ms(text, rank),
        "rank 0, resident MB": resident_mb(),
    }


def planned(rank: int, ranks: int, positions: list[int]) -> tuple[int, float]:
    """Return the length of a rank's header, and how long it describes and lays out what it has."""
    offer, times, length = offer_of(rank, ranks), list[float](), 0
    kinds = {name: kind for name, (kind, _, _) in offer.items()}
    for _ in range(_REPEATS):
        began = time.perf_counter()
        for data in described(offer):
            digest_of(data)
        parts = parts_of(offer)
        layout = FileLayout.summed([parts[position] for position in positions], kinds)
        times.append(1e3 * (time.perf_counter() - began))
        length = len(layout.header)
    return length, statistics.median(times)


def found_ms(text: bytearray, rank: int) -> float:
    """Return how long a rank reads the manifest, and finds in it a row of each of the tensors."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / NAME).write_bytes(text)
        began = time.perf_counter()
        catalog, row = catalog_of(Path(folder)), Box((rank, 0), (1, 64))
        for name in catalog.tree:
            assert [stored.file for _, stored, _ in catalog.cut(name).meeting(row)] == [rank]
        return 1e3 * (time.perf_counter() - began)
