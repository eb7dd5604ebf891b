"""Real images to learn from: scikit-learn's embedded digits, or a directory of IDX files.

Both give the same form: float32 pixels from 0 to 1 with one channel, int64 labels, and a training
    and
a test split, so that a program need not know which it was given.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import Dataset

from dure.data.digits import read_digits
from dure.data.idx import IdxSplit, read_idx_directory
from dure.data.partition import DataPartitioner

__all__ = ["ImageData", "Images", "load_digits", "load_idx"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Images(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Labelled images; item i is (pixels [1, height, width], label []).

    Attributes:
        pixels: float32 [n, 1, height, width], from 0 to 1.
        labels: int64 [n].

    Obtained from:
        `ImageData.train` and `ImageData.test`.

    Example:
        ```python
        from dure import data

        images = data.Images(pixels=torch.zeros(5, 1, 8, 8), labels=torch.arange(5))
        pixels, label = images[3]
        assert pixels.shape == (1, 8, 8) and label.item() == 3
        ```
    """

    pixels: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        """Return how many images there are."""
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return image and label numbered `index`."""
        return self.pixels[index], self.labels[index]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageData:
    """A data set for classification.

    Attributes:
        name: What to call it.
        train: To learn from.
        test: To measure with; disjoint from `train`.
        num_classes: Labels are from 0 to ``num_classes - 1``.

    Obtained from:
        `load_digits` and `load_idx`.
    """

    name: str
    train: Images
    test: Images
    num_classes: int


def load_digits(test_fraction: float = 0.2, seed: int = 1234) -> ImageData:
    """Load the handwritten digits of `dure.data.digits`, without a download.

    Args:
        test_fraction: The part kept for testing, from 0 to 1.
        seed: Of the split; the same split for the same seed on every rank.

    Returns:
        Images and labels, for training and for testing.

    Raises:
        DataError: scikit-learn is not installed.
        UsageError: `test_fraction` is not from 0 to 1.

    Example:
        ```python
        from dure import data

        digits = data.load_digits()
        assert len(digits.train) > len(digits.test)
        ```
    """
    pixels, labels = read_digits()
    cut = DataPartitioner(range(len(labels)), (1 - test_fraction, test_fraction), seed)
    train, test = (
        Images(
            pixels=torch.as_tensor(pixels[part]).unsqueeze(1),
            labels=torch.as_tensor(labels[part]),
        )
        for part in cut.partitions
    )
    return ImageData(name="handwritten digits (UCI)", train=train, test=test, num_classes=10)


def load_idx(directory: str | Path) -> ImageData:
    """Load MNIST, Fashion-MNIST or another data set of IDX files.

    Args:
        directory: The folder of the four files, plain or .gz (see `dure.data.idx`).

    Returns:
        Images and labels, for training and for testing.

    Raises:
        DataError: The directory or a file is missing, truncated or foreign.

    Example:
        ```python
        folder = Path(f"mnist{dist.get_rank()}")  # usually a folder of files that were downloaded
        folder.mkdir()
        for name, n in ("train", 3), ("t10k", 1):
            images = bytes([0, 0, 8, 3, 0, 0, 0, n, 0, 0, 0, 2, 0, 0, 0, 2]) + bytes(n * 2 * 2)
            labels = bytes([0, 0, 8, 1, 0, 0, 0, n, *range(n)])
            (folder / f"{name}-images-idx3-ubyte").write_bytes(images)
            (folder / f"{name}-labels-idx1-ubyte").write_bytes(labels)

        pixels, label = data.load_idx(folder).train[2]
        assert pixels.shape == (1, 2, 2) and label.item() == 2
        ```
    """
    train, test = (_as_images(split) for split in read_idx_directory(directory))
    highest = max(int(train.labels.max()), int(test.labels.max()))
    name = Path(directory).resolve().name
    return ImageData(name=name, train=train, test=test, num_classes=highest + 1)


def _as_images(split: IdxSplit) -> Images:
    pixels = torch.tensor(split.images, dtype=torch.float32).unsqueeze(1).div_(255.0)
    return Images(pixels=pixels, labels=torch.tensor(split.labels, dtype=torch.int64))
