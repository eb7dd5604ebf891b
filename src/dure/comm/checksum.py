"""CRC-32C of bytes, by the native engine: for what is written to files and read again."""

from __future__ import annotations

from dure.native import crc32c

__all__ = ["crc32c"]
