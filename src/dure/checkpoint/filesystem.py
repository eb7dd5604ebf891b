"""torch's path `torch.distributed.checkpoint.filesystem`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.checkpoint.file_storages import FileSystemReader, FileSystemWriter, SerializationFormat
from dure.torch_names import TYPE_CHECKING, lazy_names

__all__ = ["FileSystemReader", "FileSystemWriter", "SerializationFormat"]

if not TYPE_CHECKING: __getattr__, __dir__ = lazy_names(__name__)
