"""torch's path `torch.distributed.rendezvous`.

`import dure.rendezvous` sets this module as an attribute of `dure`, in place of the function of
this name. So the module is callable.
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
