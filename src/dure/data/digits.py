"""The handwritten digits that ship with scikit-learn: real images that need no download.

1,797 digits by 13 people, 8 x 8 pixels of 17 levels (UCI, Alpaydin and Kaynak, 1998). The package
is an extra, looked for and imported only when the digits are wanted. This module needs no torch.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray

from dure.errors import DataError

__all__ = ["read_digits", "require_digits"]

_LEVELS = 16.0


def require_digits() -> None:
    """Check, without loading anything, that the digits can be read.

    Raises:
        DataError: scikit-learn, which carries them, is not installed.

    Example:
        ```python
        from dure import data

        data.require_digits()  # raises without scikit-learn
        ```
    """
    if find_spec("sklearn") is None:
        raise DataError(
            "the handwritten digits are not installed",
            seen="they ship with scikit-learn, which Python cannot find",
            fix="Run `pip install '.[demo]'` in the checkout of Dure, or give a directory of IDX "
            "files (MNIST and similar).",
        )


def read_digits() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Read the digits.

    Returns:
        Pixels [1797, 8, 8] from 0 to 1, and labels [1797].

    Raises:
        DataError: scikit-learn is not installed.

    Example:
        ```python
        images, labels = data.read_digits()
        assert len(images) == len(labels) == 1797
        ```
    """
    require_digits()
    bunch = importlib.import_module("sklearn.datasets").load_digits()
    return (bunch.images / _LEVELS).astype(np.float32), bunch.target.astype(np.int64)
