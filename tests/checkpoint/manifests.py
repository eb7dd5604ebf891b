"""Manifests that are made by hand."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

NAME = "manifest.json"


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the fields of a manifest; its checksum is not looked at."""
    fields = json.loads((Path(folder) / NAME).read_text())
    del fields["sha256"]
    return fields


def write_manifest(folder: str | os.PathLike[str], fields: dict[str, Any] | bytes) -> None:
    """Write a manifest with a right checksum; bytes are a JSON object with fields."""
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    rest = b'", ' + text[1:]
    digest = hashlib.sha256(rest).hexdigest().encode()
    (Path(folder) / NAME).write_bytes(b'{"sha256": "' + digest + rest)
