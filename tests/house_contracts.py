"""Contracts of import-linter that it does not have itself: rooms, cycles of modules, dynamic imports.

``pyproject.toml`` names them and fills them in; ``make check`` runs them in ``.types``, where every mapped folder is
linked under the package's name.  The graph holds lazy imports and those for type checkers like all others.
"""

from __future__ import annotations

import ast
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output

PACKAGE = "stepsight"


class _Listed(Contract):
    """A contract whose breaches are lines of text."""

    def breaches(self, graph: ImportGraph) -> list[str]:
        raise NotImplementedError

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        found = self.breaches(graph)
        return ContractCheck(kept=not found, metadata={"breaches": found})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for breach in check.metadata["breaches"]:
            output.print_error(breach, bold=False)
            output.new_line()


class RoomsContract(_Listed):
    """Every module imports only what its rooms may import.

    Options:
        rooms: Lines ``room: what it may import``, in modules and packages (with all that is in them) separated by
            spaces.  A room may also import itself, the standard library and what the room around it may, unless its
            list begins with ``only``.
    """

    type_name = "rooms"

    rooms = fields.ListField(subfield=fields.StringField())

    def breaches(self, graph: ImportGraph) -> list[str]:
        lists = {room: names.split() for room, _, names in (line.partition(":") for line in self.rooms)}
        found = []
        for module in sorted(m for m in graph.modules if _within(m, PACKAGE)):
            rooms = sorted((room for room in lists if _within(module, room)), key=len, reverse=True)
            allowed: list[str] = []
            for room in rooms:
                allowed += [room, *lists[room]]
                if "only" in lists[room]:
                    break
            for imported in sorted(graph.find_modules_directly_imported_by(module)):
                standard = imported.partition(".")[0] in sys.stdlib_module_names
                if not standard and not any(_within(imported, name) for name in allowed):
                    found.append(f"{module} imports {imported}, which {rooms[0] if rooms else 'no room'} may not")
        return found


class AcyclicContract(_Listed):
    """No module and no folder imports itself through others, be it within a function.

    A folder is the modules that lie directly in it.  The façade may be imported from anywhere above the rooms.
    """

    type_name = "acyclic"

    def breaches(self, graph: ImportGraph) -> list[str]:
        own = sorted(module for module in graph.modules if _within(module, PACKAGE))
        imports = {m: {i for i in graph.find_modules_directly_imported_by(m) if _within(i, PACKAGE)} for m in own}
        folders: dict[str, set[str]] = {}
        for module, imported in imports.items():
            here = _folder(module)
            there = {_folder(each) for each in imported if each != PACKAGE}
            folders.setdefault(here, set()).update(there - {here})
        return _cycles(imports) + _cycles(folders)


def _cycles(imports: dict[str, set[str]]) -> list[str]:
    ordered = {name: sorted(imported) for name, imported in imports.items()}
    found = []
    while True:
        try:
            TopologicalSorter(ordered).prepare()
            return found
        except CycleError as error:
            cycle = error.args[1][::-1]
            found.append(" -> ".join(cycle))
            ordered[cycle[0]].remove(cycle[1])


def _folder(module: str) -> str:
    """The folder that a module lies in; a package's own module lies in its folder."""
    return module if Path(*module.split(".")).is_dir() else module.rpartition(".")[0]


class StaticImportsContract(_Listed):
    """Nothing is imported by name at run time, where no contract would see it.

    Options:
        exceptions: Modules that may.
    """

    type_name = "static_imports"

    exceptions = fields.ListField(subfield=fields.StringField())

    def breaches(self, graph: ImportGraph) -> list[str]:
        own = sorted(module for module in graph.modules if _within(module, PACKAGE) and module not in self.exceptions)
        return [f"{module}:{line} imports by name" for module in own for line in _dynamic_imports(_source(module))]


def _within(module: str, name: str) -> bool:
    """Return whether a module is ``name`` or in it; ``name.`` with a dot at its end means the module alone."""
    return f"{module}." == name if name.endswith(".") else module == name or module.startswith(f"{name}.")


def _source(module: str) -> str:
    path = Path(*module.split("."))
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text("utf-8")


def _dynamic_imports(source: str) -> list[int]:
    """Return the lines that speak of ``import_module`` or ``__import__``."""
    names = {"import_module", "__import__"}
    found = []
    for node in ast.walk(ast.parse(source)):
        said = {
            ast.Name: lambda n: {n.id},
            ast.Attribute: lambda n: {n.attr},
            ast.ImportFrom: lambda n: {alias.name for alias in n.names},
        }.get(type(node), lambda n: set())(node)
        if said & names:
            found.append(node.lineno)
    return found
