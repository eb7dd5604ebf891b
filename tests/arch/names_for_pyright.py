"""What a type checker sees of modules that refuse names of torch (`dure.torch_names`).

Checked by `make lint`, and never run: a comment that silences an error which pyright does not
report is an error itself.
"""

# pyright: reportAttributeAccessIssue=true, reportUnnecessaryTypeIgnoreComment=true
from dure.algorithms import Jion  # pyright: ignore[reportAttributeAccessIssue]
from dure.fsdp import fully_shrad  # pyright: ignore[reportAttributeAccessIssue]

__all__ = ["Jion", "fully_shrad"]
