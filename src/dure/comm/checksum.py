"""CRC-32C of bytes, by the native engine: for what is written to files and read again.

`copy_from_file` reads and sums in one pass; `copy_bytes` is for what no cache holds.
"""

from __future__ import annotations

from dure.native import copy_bytes, copy_from_file, crc32c

__all__ = ["copy_bytes", "copy_from_file", "crc32c"]
