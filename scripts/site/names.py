"""The names under which a program finds things, for a reader of the sources (Griffe's extension).

Three ways of writing modules hide names from whoever only reads them:

* ``other = function`` gives a function a second name. It becomes an alias, too.
* A package imports a function from a module that is called as it is. Whoever imports the function
  from the package has the function, where Griffe sees the module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import griffe

Found = griffe.Object | griffe.Alias


class Names(griffe.Extension):
    """Makes every public name lead to what a program gets under it."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Turn second names into aliases, and modules that hide what they are called after."""
        modules = list(_modules(pkg))
        for module in modules:
            for name, member in list(module.members.items()):
                target = _target(pkg, member)
                if target is not None:
                    module.set_member(name, griffe.Alias(name, target=target, parent=module))
        for alias in (m for module in modules for m in module.members.values() if m.is_alias):
            with suppress(griffe.GriffeError):  # of another package, which is not read
                alias.resolve_target()
        # Only now: until here the modules were needed to find what is in them.
        for package, name, found in [one for module in modules for one in _hidden(pkg, module)]:
            package.set_member(name, griffe.Alias(name, target=found, parent=package))


def _modules(module: griffe.Module) -> Iterator[griffe.Module]:
    yield module
    for member in module.members.values():
        if isinstance(member, griffe.Module):
            yield from _modules(member)


def _target(pkg: griffe.Module, member: Found) -> str | None:
    """Return the path of what a member ought to be an alias of, or None where it is right."""
    if isinstance(member, griffe.Alias):
        path = member.target_path
        package, _, name = path.rpartition(".")
        home = _find(pkg, package)
        if home is not None and home.is_module and _is_module(home.members.get(name)):
            return home.imports.get(name)
        return None
    if isinstance(member, griffe.Attribute) and isinstance(member.value, griffe.ExprName):
        other = _find(pkg, member.value.canonical_path)
        if other is not None and (other.is_function or other.is_class):
            return other.path
    return None


def _hidden(
    pkg: griffe.Module, module: griffe.Module
) -> Iterator[tuple[griffe.Module, str, Found]]:
    """Yield what a package exports under the names of modules in it."""
    for name in module.exports or ():
        path = module.imports.get(str(name), "")
        if _is_module(module.members.get(str(name))) and path != f"{module.path}.{name}":
            found = _find(pkg, path)
            if found is not None:
                yield module, str(name), found


def _is_module(member: Found | None) -> bool:
    return isinstance(member, griffe.Module)


def _find(pkg: griffe.Module, path: str) -> Found | None:
    """Return what stands at `path` in the package, or None."""
    inside = path.removeprefix(pkg.path).lstrip(".")
    if not path.startswith(f"{pkg.path}.") or not inside:
        return None
    with suppress(KeyError, griffe.GriffeError):
        return pkg[inside]
    return None
