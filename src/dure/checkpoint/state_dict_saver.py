"""torch's path `torch.distributed.checkpoint.state_dict_saver`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from dure.checkpoint.sharded import (
    AsyncCheckpointerType, AsyncSaveResponse, async_save, save, save_state_dict
)

__all__ = ["AsyncCheckpointerType", "AsyncSaveResponse", "async_save", "save", "save_state_dict"]
