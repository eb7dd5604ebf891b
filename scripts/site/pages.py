"""Pages of the site from outside docs/: documents of the root, and examples.

MkDocs calls these functions by name (`hooks` in mkdocs.yml). Links in documents of the repository
are relative to the files, so that they work everywhere. On the site, a link that leaves docs/ is
replaced by one to the page of that file; without such a page the build fails.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
EXAMPLES = [
    *sorted((ROOT / "examples").glob("*.py")),
    *sorted((ROOT / "examples/recipes").glob("*.py")),
    *(ROOT / f"examples/llm/{name}.py" for name in ("train", "model")),
    *sorted((ROOT / "examples/clients").glob("*.py")),
]
# Where a file of the root is found on the site.
PAGES = {
    "README.md": "overview.md",
    "README.ko.md": "ko/overview.md",
    "ARCHITECTURE.md": "project/architecture.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "LICENSE": "project/license.md",
    "SECURITY.md": "project/security.md",
    "examples/README.md": "examples/index.md",
}
COPIED = tuple(PAGES)
PAGES |= {
    str(path.relative_to(ROOT)): str(path.relative_to(ROOT).with_suffix(".md")) for path in EXAMPLES
}
# Which pages a search finds before others that have its words. A folder's weight is that of its
# pages; the empty name is docs/ itself, which has the guides.
WEIGHTS = {"": 4, "reference": 3, "project": 0.5, "decisions": 0.5, "examples": 0.3, "ko": 0.1}
SEARCHED = {
    "clients.md": 6,
    "debugging.md": 5,
    "fsdp.md": 6,
    "memory.md": 5,
    "reference/collectives.md": 4,
    # Background, and pages that have words of all others.
    "algorithms.md": 1,
    "differences.md": 1,
    "index.md": 1,
    "overview.md": 1,
    "performance.md": 1,
    "performance_tables.md": 1,
    "results.md": 1,
    "stability.md": 1,
    "walkthrough_all_reduce.md": 1,
}
LINK = re.compile(r"(\]\()(?!\w+:|#)([^)#\s]+)")
ANCHOR = re.compile(r'<a (href="(?!\w+:|#)([^"#]+)[^"]*")')
FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace each folder in the navigation, such as `decisions/`, by the pages in it."""
    config.nav = _expanded(config.nav)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made of files outside docs/."""
    made = {PAGES[name]: _moved((ROOT / name).read_text(), name) for name in COPIED}
    made[PAGES["LICENSE"]] = f"# License\n\n{(ROOT / 'LICENSE').read_text()}"
    made |= {PAGES[str(p.relative_to(ROOT))]: _example(p) for p in EXAMPLES}
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Turn links that leave docs/ to the pages that the files there have become."""
    source = page.file.src_uri
    weight = SEARCHED.get(source, WEIGHTS[source.rpartition("/")[0].partition("/")[0]])
    page.meta.setdefault("search", {"boost": weight})
    if page.file.generated_by is not None:
        return markdown
    return _moved(markdown, f"docs/{source}", posixpath.dirname(source))


def on_page_content(html: str, page: Page, **_: object) -> str:
    """Mark links from Korean pages to English ones; docs/theme/dure.css shows the mark."""
    if not page.file.src_uri.startswith("ko/"):
        return html

    def marked(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page.url), match[2]))
        return match[0] if target.startswith("ko/") else f'<a hreflang="en" {match[1]}'

    return ANCHOR.sub(marked, html)


def on_post_page(output: str, page: Page, **_: object) -> str:
    """Say which language a page is in; the theme knows one for all of them."""
    if page.file.src_uri.startswith("ko/"):
        return output.replace('<html lang="en"', '<html lang="ko"', 1)
    return output


def _expanded(nav: Any) -> Any:
    match nav:
        case dict():
            return {title: _expanded(part) for title, part in nav.items()}
        case list():
            return [_expanded(part) for part in nav]
        case str() if nav.endswith("/"):
            return _in_folder(nav)
        case _:
            return nav


def _in_folder(folder: str) -> list[str]:
    if folder == "examples/":
        return [f"{folder}index.md", *(PAGES[str(p.relative_to(ROOT))] for p in EXAMPLES)]
    names = [path.name for path in (ROOT / "docs" / folder).glob("*.md")]
    return [folder + name for name in sorted(names, key=lambda n: (n[0].isdigit(), n))]


def _moved(text: str, name: str, folder: str | None = None) -> str:
    """Rewrite the links of a document that lies at `name` in the repository.

    Args:
        text: The document.
        name: Its path from the root.
        folder: That of its page on the site; None: what `PAGES` says.
    """
    if folder is None:
        folder = posixpath.dirname(PAGES[name])

    def turned(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(name), match[2]))
        if target.startswith("docs/"):
            target = target.removeprefix("docs/")
        elif target in PAGES:
            target = PAGES[target]
        else:
            raise PluginError(f"{name} links to {match[2]}, which is no page: see {__file__}")
        return match[1] + posixpath.relpath(target, folder or ".")

    parts = FENCE.split(text)
    parts[::2] = [LINK.sub(turned, part) for part in parts[::2]]
    return "".join(parts)


def _example(path: Path) -> str:
    """Return an example as a page: its name, what it says of itself, and the whole of it."""
    source = path.read_text()
    told = ast.get_docstring(ast.parse(source)) or ""
    first = told.partition("\n")[0]
    return f"""---
hide: [toc]
---

# {path.relative_to(ROOT / "examples").with_suffix("")}

{first}

``` {{ .python title="{path.relative_to(ROOT)}" }}
{source}```
"""
