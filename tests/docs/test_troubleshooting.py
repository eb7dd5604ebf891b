"""docs/troubleshooting.md: every class of errors has an entry, and the texts are those printed."""

import ast
import re

from dure import errors
from tests.docs.snippets import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
TEXTS = PAGE.partition("\n## Error texts\n")[2]
ROW = re.compile(r"^\| `([^`]+)` \| `(\w+)` \| [^|]+ \| [^|]+ \|$", re.MULTILINE)


def test_every_class_of_errors_has_an_entry() -> None:
    assert [name for name in errors.__all__ if f"`{name}`" not in TEXTS] == []


def test_texts_are_those_that_the_package_prints() -> None:
    nodes = [
        node
        for path in (ROOT / "src" / "dure").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
    ]
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    printed = "\n".join(
        node.value
        for node in nodes
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in docstrings
    )
    rows = ROW.findall(TEXTS)
    assert len(rows) > 50
    pieces = [(text, piece.strip()) for text, _ in rows for piece in text.split("...")]
    assert [text for text, piece in pieces if piece and piece not in printed] == []
    assert [name for _, name in rows if name not in errors.__all__] == []
