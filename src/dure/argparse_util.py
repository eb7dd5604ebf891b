"""torch's path `torch.distributed.argparse_util`. Written by scripts/torch_names."""

# fmt: off
# ruff: noqa
# pyright: reportPrivateUsage=false, reportUnusedImport=false
from torch.distributed.argparse_util import check_env, env

__all__ = ["check_env", "env"]
