"""torch's path `torch.distributed.checkpoint.filesystem`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.checkpoint.file_storages import FileSystemReader, FileSystemWriter, SerializationFormat
from dure.torch_names import TYPE_CHECKING, getter

__all__ = ["FileSystemReader", "FileSystemWriter", "SerializationFormat"]

if not TYPE_CHECKING: __getattr__ = getter(__name__)
