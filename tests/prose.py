"""Check the English of documentation, help texts and docstrings: ``python -m tests.prose``.

The checks are proselint's (those of ``ENABLED``), the vocabulary of ``prose_vocabulary.toml``, and the length of
sentences in Markdown files.  Code, tables and names in backticks are not prose.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from proselint.checks import __register__
from proselint.registry import CheckRegistry
from proselint.registry.checks import Check, types
from proselint.tools import LintFile

ROOT = Path(__file__).parents[1]
MARKDOWN = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**/*.md")
ROOMS = ("dataset", "features", "gnn", "simulator", "training", "experiments", "stepsight")
ENABLED = {"stepsight": True}
ENABLED |= dict.fromkeys(("archaism", "malapropisms", "nonwords", "oxymorons", "redundancy"), True)
ENABLED |= dict.fromkeys(("cliches", "mixed_metaphors", "needless_variants", "uncomparables"), True)
MOST = 1000  # findings of a file
LONGEST = 40  # words of a sentence in a Markdown file
_CODE = re.compile(r"^(`{3,})[^\n]*\n.*?^\1$|`[^`\n]+`|<[^>\n]+>|^\|.*$", re.M | re.S)
_DOCTEST = re.compile(r"^\s*(?:>>>|\.\.\.).*$|``[^`]+``|`[^`\n]+`", re.M)
_END = re.compile(r"[.:;!?](?:\s|$)|\n\s*(?:\n|[-*#|:>]|\d+\.\s)")


def main() -> int:
    """Print what is wrong, a line each; 1 if anything is."""
    words = tomllib.loads((ROOT / "tests" / "prose_vocabulary.toml").read_text())["instead"]
    registry = CheckRegistry()
    registry.register_many(__register__)
    registry.register_many(tuple(_avoid(phrase, instead) for phrase, instead in words.items()))
    found = [*_documents(), *_docstrings()]
    print("\n".join(found) or "the prose is in order")
    return int(bool(found))


def _avoid(phrase: str, instead: str) -> Check:
    spaced = r"\s+".join(map(re.escape, phrase.split()))
    return Check(
        check_type=types.Existence(items=(spaced,)), path="stepsight.vocabulary", message=f"'{phrase}': write {instead}"
    )


def _documents() -> Iterator[str]:
    for path in sorted(path for pattern in MARKDOWN for path in ROOT.glob(pattern)):
        text = _CODE.sub(_blank, path.read_text())
        yield from _lint(path, text)
        start = 0
        for end in _END.finditer(text):
            if len(text[start : end.start()].split()) > LONGEST:
                yield f"{_place(path, text.count(chr(10), 0, start) + 1)}: a sentence has more than {LONGEST} words"
            start = end.end()


def _docstrings() -> Iterator[str]:
    """Docstrings and help texts: every string of a module that holds a sentence."""
    for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        code = path.read_text()
        lines = [""] * (code.count("\n") + 2)  # each string at its own lines
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                for row, line in enumerate(_DOCTEST.sub(_blank, node.value).split("\n"), node.lineno - 1):
                    lines[min(row, len(lines) - 1)] += f" {line}"
        yield from _lint(path, "\n".join(lines))


def _lint(path: Path, text: str) -> Iterator[str]:
    if text.strip():
        for found in LintFile(str(path), text).lint({"checks": ENABLED, "max_errors": MOST}):
            yield f"{_place(path, found.pos[0])}: {' '.join(found.check_result.message.split())}"


def _place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def _blank(code: re.Match[str]) -> str:
    """Keep the lines of what is not prose, without its words; ``code`` stands for a name."""
    return "\n" * code[0].count("\n") or "code"


if __name__ == "__main__":
    sys.exit(main())
