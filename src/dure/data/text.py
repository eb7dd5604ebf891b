"""Real text to learn from, without a download: the sources of Python's standard library.

Every machine that runs this program has them. Text becomes training samples in three steps:

    text  --Vocabulary-->  tokens [n]  --split-->  train | test  --Windows-->  (x, y) pairs

A *vocabulary* numbers the most frequent characters; the others share number 0. The *split* is by
position: the last part of the text is for testing, so that no test character was trained on. A
*window* of length w is w tokens as input and, as targets, the same shifted by one: the model learns
to predict each next character. Windows do not overlap, so an epoch sees each token once as a
target.
"""

from __future__ import annotations

import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from dure.errors import DataError, UsageError

__all__ = ["TextData", "Vocabulary", "Windows", "load_python_sources", "read_python_sources"]

_UNKNOWN = "\ufffd"
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"})


class Vocabulary:
    """Characters and their numbers; number 0 is for every character that has none.

    Args:
        characters: Those that get numbers, from 1 on, in this order; each once.

    Raises:
        UsageError: A character comes twice.

    Example:
        ```python
        from dure import data

        vocabulary = data.Vocabulary("abc")
        tokens = vocabulary.encode("cab")
        assert tokens.tolist() == [3, 1, 2] and vocabulary.decode(tokens) == "cab"
        ```
    """

    def __init__(self, characters: str) -> None:
        if len(set(characters)) != len(characters):
            twice = sorted(c for c, n in Counter(characters).items() if n > 1)
            raise UsageError("a vocabulary has each character once", seen=f"more of {twice}")
        self._characters = _UNKNOWN + characters.replace(_UNKNOWN, "")
        codes = np.array([ord(c) for c in self._characters], dtype=np.uint32)
        self._order = np.argsort(codes, kind="stable")
        self._codes = codes[self._order]

    @classmethod
    def of(cls, text: str, max_size: int = 128) -> Vocabulary:
        """Make a vocabulary of the most frequent characters of `text`, at most `max_size` - 1.

        The same for the same text: they are numbered in the order of their code points, and of
        equally frequent ones those that come first in it are taken.
        """
        frequent = sorted(Counter(text).items(), key=lambda item: (-item[1], item[0]))
        return cls("".join(sorted(c for c, _ in frequent[: max(0, max_size - 1)])))

    def __len__(self) -> int:
        """Return how many numbers there are, the unknown character's among them."""
        return len(self._characters)

    def encode(self, text: str) -> torch.Tensor:
        """Return the number of each character.

        Shapes:
            [len(text)]; uint8, or int32 where the vocabulary has more than 256 numbers.
        """
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        places = np.minimum(np.searchsorted(self._codes, codes), len(self._codes) - 1)
        numbers = np.where(self._codes[places] == codes, self._order[places], 0)
        return torch.from_numpy(numbers.astype(np.uint8 if len(self) <= 256 else np.int32))

    def decode(self, tokens: torch.Tensor) -> str:
        """Return the text of `tokens` [n], with U+FFFD for unknown characters."""
        return "".join(self._characters[int(token)] for token in tokens.tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Pieces of a text; item i is (input [length], target [length]), both int64.

    Attributes:
        tokens: The text's numbers [n].
        length: Tokens of a window.

    Example:
        ```python
        windows = data.Windows(tokens=torch.arange(7), length=3)
        inputs, targets = windows[0]
        assert inputs.tolist() == [0, 1, 2] and targets.tolist() == [1, 2, 3]
        ```
    """

    tokens: torch.Tensor
    length: int

    def __len__(self) -> int:
        """Return how many complete windows there are; the last token is only a target."""
        return max(0, len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return window `index`, and the same one token later.

        Raises:
            IndexError: There is no such window.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index % len(self) * self.length
        piece = self.tokens[start : start + self.length + 1].long()
        return piece[:-1], piece[1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextData:
    """A text for next-character models.

    Attributes:
        name: What to call it.
        vocabulary: The meaning of its tokens.
        train: To learn from.
        test: To measure with; the text after `train`'s.

    Obtained from:
        `load_python_sources`.
    """

    name: str
    vocabulary: Vocabulary
    train: Windows
    test: Windows


def read_python_sources(max_bytes: int = 1_000_000, directory: str | Path | None = None) -> str:
    """Read the first sources of Python's standard library, in the order of their names.

    Modules of the top folder come first, then packages. Tests and installed packages are left out.
    The same text on every machine with the same Python.

    Args:
        max_bytes: Stop after so many bytes (as UTF-8); the last file is cut there.
        directory: Look here; by default where this Python has its library.

    Raises:
        DataError: There is no source, as where Python was installed without them.

    Example:
        ```python
        from dure import data

        text = data.read_python_sources(max_bytes=10_000)
        assert 0 < len(text) <= 10_000
        ```
    """
    home = Path(directory or sysconfig.get_path("stdlib"))
    parts: list[bytes] = []
    left = max_bytes
    for path in _sources(home):
        if left <= 0:
            break
        try:
            content = path.read_bytes()[:left]
        except OSError:
            continue
        parts.append(content)
        left -= len(content)
    text = b"".join(parts).decode(errors="replace").replace("\r\n", "\n")
    if not text:
        raise DataError(
            "there are no sources of Python's standard library to learn from",
            seen=f"no readable *.py file in {home}",
            fix="Use a Python that was installed with its sources, or read a text of your own.",
        )
    return text


def _sources(home: Path) -> Iterator[Path]:
    """Go through the modules of a folder, then through those of its packages."""
    if not home.is_dir():
        return
    entries = sorted(home.iterdir(), key=lambda path: path.name)
    yield from (p for p in entries if p.suffix == ".py" and p.is_file())
    for folder in entries:
        if folder.name not in _LEFT_OUT and (folder / "__init__.py").is_file():
            yield from _sources(folder)


def load_python_sources(
    window: int,
    *,
    max_bytes: int = 1_000_000,
    test_fraction: float = 0.1,
    max_vocabulary: int = 128,
) -> TextData:
    """Load sources of Python's standard library as windows of characters.

    Args:
        window: Characters that a sample has.
        max_bytes: How much text to read.
        test_fraction: The part at the end that is kept for testing, from 0 to 1.
        max_vocabulary: Numbers at most; rarer characters share one.

    Returns:
        The windows, for training and for testing, and the vocabulary.

    Raises:
        DataError: There are no sources on this machine.
        UsageError: `window` or `test_fraction` leaves no window to learn from.

    Example:
        ```python
        text = data.load_python_sources(16, max_bytes=10_000)
        assert len(text.train) > len(text.test)
        ```
    """
    text = read_python_sources(max_bytes)
    vocabulary = Vocabulary.of(text, max_vocabulary)
    tokens = vocabulary.encode(text)
    cut = len(tokens) - round(len(tokens) * test_fraction)
    if window < 1 or not 0 <= test_fraction <= 1 or cut <= window:
        raise UsageError(
            "the text has no window to learn from",
            seen=f"{cut} characters to learn from, windows of {window}",
            fix="Use shorter windows, more text, or a smaller part for testing.",
        )
    return TextData(
        name="sources of Python's standard library",
        vocabulary=vocabulary,
        train=Windows(tokens=tokens[:cut], length=window),
        test=Windows(tokens=tokens[cut:], length=window),
    )
