"""The Python that documents and docstrings show, as programs that can be run.

The blocks of a page are one program, in their order, as a reader tries them. HTML comments, which
no reader sees, stand before a block that needs more:

    <!-- ranks: 4 -->            the page's blocks run on 4 ranks, not 2
    <!-- first: CODE -->         what the block takes for granted
    <!-- not run: REASON -->     this block is left out

The blocks in the docstrings of a module are one program, too, on 2 ranks.
"""

import contextlib
import io
import os
import re
import sys
import types
import warnings
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import cloudpickle
import torch

import dure

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    # Translations have the code of their English pages (scripts/conventions.py).
    *(p for p in sorted(ROOT.glob("docs/ko/*.md")) if not (ROOT / "docs" / p.name).exists()),
]
MAKES_RANKS = ROOT / "src/dure/testing/ranks.py"  # with groups of their own, which `run` prevents
MODULES = sorted(
    path
    for path in (ROOT / "src/dure").rglob("*.py")
    if "    ```python\n" in path.read_text() and path != MAKES_RANKS
)
MODULE_FIRST = "from pathlib import Path; import torch; import dure as dist; from dure import fsdp"
INDENTED = re.compile(r"^( +)```python\n.*?^\1```$", re.MULTILINE | re.DOTALL)
RPC_FIRST = "; import os; from dure import autograd, rpc; from dure.rpc import RRef"
RPC_START = (  # not for rpc/api.py, whose examples start and end RPC
    "; from dure.optim import DistributedOptimizer; from dure.nn import RemoteModule"
    "; rank = int(os.environ['RANK']); rpc.init_rpc(f'worker{rank}', rank=rank, world_size=2)"
)
PIECE = re.compile(
    r"^<!-- (?P<mark>ranks|first|not run):(?P<text>.*?)-->$|^```python\n(?P<block>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Snippets:
    """The program of one page.

    Attributes:
        path: The document.
        ranks: How many ranks run it.
        source: All that is run; its lines are those of the document.
        left_out: Why blocks are not run, each with its line.
    """

    path: Path
    ranks: int
    source: str
    left_out: tuple[tuple[int, str], ...]


def read(path: Path) -> Snippets:
    """Read a document; lines that are no code become empty ones, so that errors name its lines."""
    text = path.read_text()
    if path.suffix == ".py":
        text = INDENTED.sub(lambda found: _dedented(found[0], found[1]), text)
    lines = [""] * (text.count("\n") + 1)
    ranks, reason = 2, ""
    left_out: list[tuple[int, str]] = []
    for piece in PIECE.finditer(text):
        group = "block" if piece["block"] is not None else "text"
        begin = text.count("\n", 0, piece.start(group))
        match piece["mark"]:
            case "ranks":
                ranks = int(piece["text"])
            case "not run":
                reason = piece["text"].strip()
            case None if reason:
                left_out.append((begin, reason))
                reason = ""
            case _:
                code = piece[group].strip(" ").splitlines()
                lines[begin : begin + len(code)] = code
    if path.suffix == ".py":
        lines[0] = MODULE_FIRST
        if "rpc" in path.parts:
            lines[0] += RPC_FIRST
            if path.parts[-2:] != ("rpc", "api.py"):
                lines[0] += RPC_START
                lines.append("rpc.shutdown()")
    return Snippets(path, ranks, "\n".join(lines), tuple(left_out))


def _dedented(block: str, indent: str) -> str:
    return re.sub(f"^{indent}", "", block, flags=re.MULTILINE)


def run(rank: int, path: str, source: str, folder: str, port: int) -> str:
    """Run a page's program on this rank of a pool, whose group is its own; return its output."""
    module = types.ModuleType("snippets_of_a_page")
    sys.modules[module.__name__] = module  # where pickle looks for what the page defines
    cloudpickle.register_pickle_by_value(module)  # as a reader's program, which is __main__
    os.chdir(folder)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(dure.get_world_size())}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.manual_seed(0)
    printed, world = io.StringIO(), dure.group.WORLD
    with (
        warnings.catch_warnings(),  # the page's filters are not those of the next
        contextlib.redirect_stdout(printed),
        mock.patch.object(dure, "init_process_group"),
        mock.patch.object(dure, "process_group", return_value=contextlib.nullcontext(world)),
        mock.patch.object(dure, "destroy_process_group"),
    ):
        exec(compile(source, path, "exec"), module.__dict__)
    dure.barrier()
    return printed.getvalue()
