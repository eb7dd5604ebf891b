"""A strict reader of Prometheus's text format, version 0.0.4."""

import re

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"'
_SAMPLE = re.compile(rf"({_NAME})(?:\{{({_LABEL}(?:,{_LABEL})*)\}})? (\S+)")

Key = tuple[str, tuple[tuple[str, str], ...]]


def parsed(text: str) -> dict[Key, float]:
    """Return the samples, by name and sorted labels.

    Asserts that each metric has one HELP and one TYPE, before its samples, which are together; that
    no sample occurs twice; that counters end in _total; and that values are numbers.
    """
    assert text.endswith("\n") or not text
    types: dict[str, str] = {}
    helped: set[str] = set()
    found: dict[Key, float] = {}
    current = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            _, _, name, words = line.split(" ", 3)
            assert name not in helped
            assert words
            helped.add(name)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name in helped
            assert name not in types
            assert kind in ("counter", "gauge")
            assert (kind == "counter") == name.endswith("_total")
            types[name] = kind
            current = name
        else:
            match = _SAMPLE.fullmatch(line)
            assert match, line
            assert match[1] == current
            labels = re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match[2] or "")
            key = match[1], tuple(sorted(labels))
            assert key not in found
            found[key] = float(match[3])
    return found
