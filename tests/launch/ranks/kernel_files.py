"""The kernel's files of a made-up machine."""

from collections.abc import Mapping
from pathlib import Path


def write(root: Path, files: Mapping[str, str]) -> None:
    """Write files below `root`, by their names."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
