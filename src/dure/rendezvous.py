"""torch's path `torch.distributed.rendezvous`.

`import dure.rendezvous` makes this module an attribute of `dure`, where torch has the function. So
the module can be called.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType

from dure.store.handlers import register_rendezvous_handler, rendezvous

__all__ = ["register_rendezvous_handler", "rendezvous"]


class _Callable(ModuleType):
    __call__ = staticmethod(rendezvous)

    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
        return importlib.import_module, (__name__,)


sys.modules[__name__].__class__ = _Callable
