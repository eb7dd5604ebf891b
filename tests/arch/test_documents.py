"""The documents name things that exist, and translations show the same code."""

import re

import dure.errors
from arch.sources import CSRC, PACKAGE, ROOT, cpp_files, python_files

DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "ko").glob("*.md")),
]
TICKED = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
PATH = re.compile(r"^(?:src|csrc|tests|docs|examples|benchmarks|scripts|\.ci)/[\w./-]+$")
CALL = re.compile(r"^(?:\w+(?:\.|::))*(\w+)\(\)$")
YAML = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
YAML_LINE = re.compile(r"(?:  )*(?:(?:- )?[\w.]+:(?: .+)?|- \{ .* \}|---|\w[\w ./~-]*)$")
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(?:#[^)]*)?\)")


def _ticked(document) -> list[str]:
    return TICKED.findall(FENCE.sub("", document.read_text()))


def test_paths_in_documents_exist():
    missing = [
        f"{document.name}: {word}"
        for document in DOCUMENTS
        for word in _ticked(document)
        if PATH.match(word) and not (ROOT / word.rstrip("/")).exists()
    ]
    assert missing == []


def test_links_between_documents_lead_somewhere():
    missing = [
        f"{document.name}: {target}"
        for document in DOCUMENTS
        for target in LINK.findall(FENCE.sub("", document.read_text()))
        if not (document.parent / target).exists()
    ]
    assert missing == []


def test_functions_in_walkthroughs_exist():
    text = "\n".join(p.read_text() for p in (*python_files(PACKAGE), *cpp_files(CSRC)))
    words = set(re.findall(r"\w+", text))
    missing = []
    for document in DOCUMENTS:
        for word in _ticked(document):
            called = CALL.match(word)
            if called and called.group(1) not in words:
                missing.append(f"{document.name}: {word}")
    assert missing == []


def test_translations_show_the_same_code():
    pages = [(path.parents[1] / path.name, path) for path in sorted(ROOT.glob("docs/ko/*.md"))]
    for pair in [(ROOT / "README.md", ROOT / "README.ko.md"), *pages]:
        english, korean = (
            [_without_comments(b) for b in FENCE.findall(path.read_text()) if b[3:7] != "text"]
            for path in pair
        )
        assert english
        assert english == korean


def _without_comments(block: str) -> str:
    """Drop what a translation may change: shell and Python comments."""
    return re.sub(r"[ \t]*#.*$", "", block, flags=re.MULTILINE)


def test_every_error_is_explained():
    text = (ROOT / "docs" / "errors.md").read_text()
    assert [name for name in dure.errors.__all__ if name not in text] == []


def test_yaml_in_documents_is_well_formed():
    """Not a reader of YAML: what a slip of the hand breaks, without one more dependency."""
    blocks = [(d.name, b) for d in DOCUMENTS for b in YAML.findall(d.read_text())]
    assert blocks
    wrong = [
        f"{name}: {line}"
        for name, block in blocks
        for line in block.splitlines()
        if line.strip() and not (YAML_LINE.match(line) and _closed(line))
    ]
    assert wrong == []


def _closed(line: str) -> bool:
    return line.count('"') % 2 == 0 and all(line.count(a) == line.count(b) for a, b in ("{}", "[]"))
