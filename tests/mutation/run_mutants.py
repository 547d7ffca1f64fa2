"""Mutation testing of the simulator's core: change one thing in the code, and see whether a test fails.

    python -m tests.mutation.run_mutants [--sample 0.25] [--only kernel] [--workers 2] [--out mutants.json]

cosmic-ray's operators make the mutants; one operator of ours removes statements.  Every mutant runs in a forked process
that imports the mutated source in place of the module's file, so that no file is changed.  Loops are interpreted
(``NUMBA_DISABLE_JIT``), and hypothesis tries few examples, always the same.

Left out are mutants that no test can tell from the code: of annotations, decorators' arguments (sizes of caches),
``__all__``, and messages.  A survivor is either a missing test or an equivalent change; ``survivors.md`` beside this
file says which.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

os.environ["NUMBA_DISABLE_JIT"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator
from parso.python.tree import ExprStmt, PythonNode

from tests.mutation.tested_modules import TESTS

ROOT = Path(__file__).parents[2]
# One or two changes of each operator: all of cosmic-ray's would be mostly alike.
OPERATORS = (
    *(f"core/ReplaceBinaryOperator_{change}" for change in (
        "Add_Sub", "Sub_Add", "Mul_Add", "Div_Mul", "FloorDiv_Mul", "Mod_FloorDiv", "BitAnd_BitOr", "BitOr_BitAnd",
        "LShift_RShift", "RShift_LShift",
    )),
    *(f"core/ReplaceComparisonOperator_{change}" for change in (
        "Lt_GtE", "Lt_LtE", "LtE_Gt", "LtE_Lt", "Gt_LtE", "Gt_GtE", "GtE_Lt", "GtE_Gt", "Eq_NotEq", "NotEq_Eq",
    )),
    *(f"core/ReplaceUnaryOperator_{change}" for change in ("Delete_USub", "Delete_Not", "Delete_Invert")),
    "core/AddNot", "core/ReplaceAndWithOr", "core/ReplaceOrWithAnd", "core/ReplaceTrueWithFalse",
    "core/ReplaceFalseWithTrue", "core/ReplaceBreakWithContinue", "core/ReplaceContinueWithBreak",
    "core/NumberReplacer", "core/ZeroIterationForLoop",
)  # fmt: skip
# Imported once, before forking; nothing of the package, for any of it may be mutated.
PRELOADED = ("numpy", "numba", "hypothesis", "pytest", "pandas", "lightgbm", "torch")


class RemoveStatement(Operator):
    """Replace an assignment or a call that is a statement of its own by ``pass``, in functions."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        if node.type == "simple_stmt" and node.get_first_leaf().column > 0:
            statement = node.children[0]
            call = isinstance(statement, PythonNode) and statement.type == "atom_expr"
            if isinstance(statement, ExprStmt) or call:
                yield statement.start_pos, statement.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        first = node.get_first_leaf()
        replaced = get_ast("pass\n").children[0]
        replaced.get_first_leaf().prefix = first.prefix
        return replaced

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


@dataclass
class Mutant:
    """One change of one module.

    Attributes:
        path: Of the module, from the root.
        operator: What changed it.
        line: Where.
        change: The changed lines, as a difference.
        outcome: ``killed``, ``survived``, ``timeout``, or empty before it has run.
    """

    path: str
    operator: str
    line: int
    change: str
    source: str
    outcome: str = ""


def find_mutants(path: str, sample: float) -> tuple[list[Mutant], int]:
    """Mutants of a module that a test could tell from it: a part of them, drawn by a seed, and how many there are."""
    source = (ROOT / path).read_text("utf-8")
    tree, skipped = get_ast(source), _told_by_nobody(source)
    operators: list[tuple[str, Operator]] = [(name.partition("/")[2], get_operator(name)()) for name in OPERATORS]
    places = [
        (start, name, operator, occurrence)
        for name, operator in [*operators, ("RemoveStatement", RemoveStatement())]
        for occurrence, (start, _) in enumerate(
            where for node in ast_nodes(tree) for where in operator.mutation_positions(node)
        )
        if not any(first <= start <= last for first, last in skipped)
    ]
    drawn = random.Random(path).sample(places, round(len(places) * sample))
    found, seen = [], {source}
    for start, name, operator, occurrence in sorted(drawn, key=lambda place: place[0]):
        mutated = mutate_code(source, operator, occurrence)
        if mutated is not None and mutated not in seen and _compiles(mutated):
            seen.add(mutated)
            lines = list(difflib.unified_diff(source.splitlines(), mutated.splitlines(), lineterm="", n=0))[3:]
            found.append(Mutant(path, name, start[0], "\n".join(lines), mutated))
    return found, len(places)


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def _told_by_nobody(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where a change changes no behaviour, or only words."""
    nodes: list[ast.AST] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            nodes += node.decorator_list
        if isinstance(node, ast.FunctionDef) and node.returns:
            nodes.append(node.returns)
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation:
            nodes.append(node.annotation)
        if isinstance(node, ast.Raise | ast.JoinedStr):
            nodes.append(node)
        if isinstance(node, ast.keyword) and node.arg == "strict":  # of zip: lengths are equal
            nodes.append(node)
    ends = [(n.lineno, n.col_offset, n.end_lineno, n.end_col_offset) for n in nodes]  # type: ignore[attr-defined]
    return [((line, column), (end_line, end_column)) for line, column, end_line, end_column in ends]


class _Mutated(MetaPathFinder, Loader):
    """Imports the mutated source in place of a module's file."""

    def __init__(self, mutant: Mutant) -> None:
        self.name = "stepsight." + mutant.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        self.mutant = mutant

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        file = str(ROOT / self.mutant.path)
        spec = ModuleSpec(name, self, origin=file, is_package=file.endswith("__init__.py"))
        spec.has_location = True
        if spec.submodule_search_locations is not None:
            spec.submodule_search_locations.append(str(Path(file).parent))
        return spec

    def exec_module(self, module: Any) -> None:
        exec(compile(self.mutant.source, module.__spec__.origin, "exec"), module.__dict__)


def start(mutant: Mutant) -> int:
    """Run the tests of a mutant in a process of its own, and return that process's number."""
    child = os.fork()
    if child:
        return child
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    code = 1
    try:
        import pytest

        mutated = _Mutated(mutant)
        assert mutated.name not in sys.modules
        sys.meta_path.insert(0, mutated)
        options = [
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "--no-header",
            "--tb=no",
            "-W",
            "ignore::pytest.PytestAssertRewriteWarning",
        ]  # hypothesis is there already
        code = int(pytest.main([*options, *TESTS[mutant.path]]))
    finally:
        os._exit(code)


def check_unchanged(paths: list[str]) -> dict[str, float]:
    """Run the tests on the code as it is, imported in the same way.

    Returns:
        Seconds that they took, by module.

    Raises:
        SystemExit: If they do not pass.
    """
    seconds: dict[tuple[str, ...], float] = {}
    for path in paths:
        if TESTS[path] not in seconds:
            begin = time.monotonic()
            as_it_is = Mutant(path, "", 0, "", (ROOT / path).read_text("utf-8"))
            run([as_it_is], 1, {path: 3600.0}, quiet=True)
            if as_it_is.outcome != "survived":
                raise SystemExit(f"tests must pass without a mutation, but those of {path} fail")
            seconds[TESTS[path]] = time.monotonic() - begin
    return {path: seconds[TESTS[path]] for path in paths}


def run(mutants: list[Mutant], workers: int, timeout_s: dict[str, float], *, quiet: bool = False) -> None:
    """Run mutants, and note what became of each."""
    waiting, running = list(reversed(mutants)), dict[int, tuple[Mutant, float]]()
    done = 0
    while waiting or running:
        while waiting and len(running) < workers:
            mutant = waiting.pop()
            running[start(mutant)] = (mutant, time.monotonic() + timeout_s[mutant.path])
        time.sleep(0.02)
        for child, (mutant, deadline) in list(running.items()):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                mutant.outcome = "survived" if os.waitstatus_to_exitcode(status) == 0 else "killed"
            elif time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                mutant.outcome = "timeout"
            else:
                continue
            del running[child]
            done += 1
            if mutant.outcome == "survived" and not quiet:
                print(f"{mutant.path}:{mutant.line} {mutant.operator}\n{mutant.change}", flush=True)
            if done % 25 == 0:
                print(f"{done}/{len(mutants)} mutants", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Mutation testing of the simulator's core.")
    parser.add_argument("--sample", type=float, default=1.0, help="part of the mutants of each module, drawn by a seed")
    parser.add_argument("--only", default="", help="modules whose path contains this")
    parser.add_argument("--workers", type=int, default=2, help="processes at once")
    parser.add_argument(
        "--patience", type=float, default=4.0, help="a mutant that takes so many times longer is killed"
    )
    parser.add_argument("--out", type=Path, default=Path("mutants.json"), help="where all mutants are written")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    for name in PRELOADED:
        __import__(name)
    from hypothesis import HealthCheck, settings

    checks = list(HealthCheck)
    settings.register_profile(
        "mutants", max_examples=10, derandomize=True, database=None, deadline=None, suppress_health_check=checks
    )
    settings.load_profile("mutants")
    chosen: list[Mutant] = []
    for path in TESTS:
        if arguments.only in path:
            mutants, count = find_mutants(path, arguments.sample)
            chosen += mutants
            print(f"{path}: {len(mutants)} of about {count} mutants", file=sys.stderr, flush=True)
    seconds = check_unchanged(list(dict.fromkeys(mutant.path for mutant in chosen)))
    limits = {path: arguments.patience * each * max(1, arguments.workers // 2) for path, each in seconds.items()}
    run(chosen, arguments.workers, limits)
    rows = [{key: value for key, value in asdict(mutant).items() if key != "source"} for mutant in chosen]
    arguments.out.write_text(json.dumps(rows, indent=1), "utf-8")
    for path in dict.fromkeys(mutant.path for mutant in chosen):
        own = [mutant for mutant in chosen if mutant.path == path]
        killed = sum(mutant.outcome != "survived" for mutant in own)
        print(f"{path}: {killed} of {len(own)} killed ({100 * killed / max(1, len(own)):.0f} %)")
    killed = sum(mutant.outcome != "survived" for mutant in chosen)
    print(f"all: {killed} of {len(chosen)} killed ({100 * killed / max(1, len(chosen)):.1f} %)")


if __name__ == "__main__":
    main()
