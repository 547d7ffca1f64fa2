"""Values of a shell script's words: variables and arithmetic, from what the script itself states."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any

from stepsight.dataset.base.errors import JobError

LONGEST_VALUE = 2**20  # characters; a variable that holds itself twice doubles with every line
MOST_NUMBER = 2**63
_PLAIN = re.compile(r"[^\\'\"$`]+")
_NAME = re.compile(r"\$([A-Za-z_]\w*|[0-9@*#?$!-])")
_IN_BRACES = re.compile(r"(#?)([A-Za-z_]\w*|[0-9@*]+)(\[[^\]]*\])?(?:(:?)([-=+?])(.*)|(.*))", re.DOTALL)
_QUOTED_ITEMS = re.compile(r'"(?:\$\{(\w+)\[@\]\}|\$@)"')  # no words where there are no items
_NAMES = re.compile(r"\$\{(\w+)\}|\$([A-Za-z_]\w*)|(?<![\w$.{])([A-Za-z_]\w*)")  # in an expression


def _quotient(left: int, right: int) -> int:
    return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)  # towards 0


_ACTIONS: dict[type[ast.AST], Callable[..., Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod},
    **{ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le},
    **{ast.Gt: operator.gt, ast.GtE: operator.ge, ast.USub: operator.neg, ast.UAdd: operator.pos},
    **{ast.Div: _quotient, ast.FloorDiv: _quotient},
    ast.Pow: lambda left, right: left**right if 0 <= right <= 64 and abs(left) <= 1024 else MOST_NUMBER,
}


def part_end(text: str, at: int) -> int:
    """The place after a character, a quoted text or a substitution; past the end if that is never closed."""
    char, following = text[at], text[at + 1 : at + 2]
    if char == "\\":
        return min(at + 2, len(text))
    if char in "'`":
        return (text.find(char, at + 1) + 1) or len(text) + 1
    if char == '"':
        at += 1
        while at < len(text) and text[at] != '"':
            at = at + 2 if text[at] == "\\" else part_end(text, at) if text[at] in "$`" else at + 1
        return min(at, len(text)) + 1
    if char == "$" and following in ("(", "{"):
        closing, depth, at = {"(": ")", "{": "}"}[following], 1, at + 2
        while at < len(text) and depth:
            depth += (text[at] == following) - (text[at] == closing)
            at = part_end(text, at) if text[at] in "'\"\\" and following == "(" else at + 1
        return at if depth == 0 else len(text) + 1
    return at + 1


class Variables:
    """Variables of a script while it is read; those that the user defined keep their values.

    Attributes:
        values: By name; a list is an array.
        unset: Names that the script uses and does not set, in the order of their first use.
    """

    def __init__(self, defined: dict[str, str]) -> None:
        self.values: dict[str, str | list[str]] = dict(defined)
        self.unset: dict[str, None] = {}
        self._defined = frozenset(defined)

    def set(self, name: str, value: str | list[str], *, add: bool = False) -> None:
        """Set a variable, or append to it."""
        if name in self._defined:
            return
        old = self.values.get(name)
        if add and isinstance(value, list):
            value = [*(old if isinstance(old, list) else [old] if old else []), *value]
        elif add and isinstance(value, str):
            value = [*old, value] if isinstance(old, list) else (old or "") + value
        if sum(map(len, value)) > LONGEST_VALUE:
            raise JobError(f"a variable of a script must hold at most {LONGEST_VALUE} characters, got more in {name}")
        self.values[name] = value

    def text(self, name: str) -> str:
        """A variable as one text; empty where it is not set."""
        value = self.values.get(name)
        if value is None and name.isidentifier():
            self.unset[name] = None
        return " ".join(value) if isinstance(value, list) else value or ""

    def joined(self, raw: str, *, quotes: bool = True) -> str:
        """The text that a written word expands to, without splitting: of an assignment, or of a here-document."""
        return "".join(text for text, _ in self._pieces(raw, quotes))

    def expanded(self, raw: str) -> list[str]:
        """The words that a written word expands to."""
        if (found := _QUOTED_ITEMS.fullmatch(raw)) and not self.values.get(found[1] or "@"):
            return []
        words, ended = list[str](), True
        for text, whole in self._pieces(raw, True):
            for blank, part in [("", text)] if whole else re.findall(r"(\s+)|(\S+)", text):
                if part or not blank:
                    words[len(words) if ended else -1 :] = [part if ended else words[-1] + part]
                ended = bool(blank)
        return words

    def _pieces(self, raw: str, quotes: bool) -> Iterator[tuple[str, bool]]:
        """Parts of a written word, and whether blanks in a part do not end the word; what commands print is empty."""
        at, length, quoted = 0, 0, False
        while at < len(raw):
            char, start = raw[at], at
            at = at + 1 if char == '"' else part_end(raw, at)
            pieces = list[tuple[str, bool]]()
            if char == "\\" and start + 1 < len(raw):
                pieces = [(raw[start + 1], True)] if raw[start + 1] != "\n" else []  # otherwise the line goes on
            elif char == "'" and quotes and not quoted:
                pieces = [(raw[start + 1 : at - 1], True)]
            elif char == '"' and quotes:
                pieces, quoted = [("", True)], not quoted
            elif raw.startswith("$((", start):
                pieces = [(self.arithmetic(raw[start + 3 : at - 2]), True)]
            elif raw.startswith("${", start):
                pieces = self._braces(raw[start + 2 : at - 1], quoted)
            elif char != "`" and not raw.startswith("$(", start):
                named, plain = _NAME.match(raw, start), _PLAIN.match(raw, start)
                pieces = [(self.text(named[1]), quoted) if named else (plain[0] if plain else char, True)]
                at = named.end() if named else plain.end() if plain else start + 1
            length += sum(len(text) for text, _ in pieces)
            if length > LONGEST_VALUE:
                raise JobError(f"a word of a script must have at most {LONGEST_VALUE} characters, got {raw!r:.60}")
            yield from pieces

    def _braces(self, text: str, quoted: bool) -> list[tuple[str, bool]]:
        """Parts of ``${text}``."""
        found = _IN_BRACES.fullmatch(text)
        if found is None:
            return []
        length, name, index, colon, kind, default, other = found.groups()
        value = self.values.get(name)
        if other:  # a part of a value, or one with replaced words: not worked out here
            self.unset[f"{name}{other}"] = None
            return [("", quoted)]
        if length:
            return [(str(len(value or "")), True)]
        if index in ("[@]", "[*]") and found.end(3) == len(text):
            items = value if isinstance(value, list) else [value] if value else []
            return [piece for item in items for piece in ((" ", False), (item, quoted))][1:]
        if isinstance(value, list) and index is not None:
            place = self.arithmetic(index[1:-1])
            value = value[int(place)] if place.lstrip("-").isdigit() and int(place) < len(value) else ""
        given = bool(value) if colon else value is not None
        if kind is not None and (kind == "+" or not given):
            return [(self.joined(default) if (kind == "+") == given and kind != "?" else "", quoted)]
        return [(self.text(name) if index is None else str(value or ""), quoted)]

    def arithmetic(self, text: str) -> str:
        """The value of ``$(( text ))``; empty where it is not known, as with a variable that is not set."""
        unknown = any(not self.values.get(name) for found in _NAMES.findall(text) for name in found if name)
        if unknown or "$(" in text.replace("$((", "") or "`" in text:
            return ""
        text = self.joined(text.strip())
        for _ in range(4):  # a variable may hold an expression
            text = re.sub(r"(?<![\w.])[A-Za-z_]\w*", lambda found: self.text(found[0]) or "unknown", text)
        try:
            return str(_number(ast.parse(text.replace("&&", " and ").replace("||", " or ").strip(), mode="eval").body))
        except (SyntaxError, ValueError, KeyError, ZeroDivisionError, RecursionError, MemoryError):
            return ""


def _number(node: ast.AST) -> int:
    match node:
        case ast.Constant(value=int(value)) if type(value) is int:
            result = value
        case ast.UnaryOp(op=op, operand=one) if type(op) in _ACTIONS:
            result = int(_ACTIONS[type(op)](_number(one)))
        case ast.BoolOp():
            values = [_number(value) != 0 for value in node.values]
            result = int(all(values) if isinstance(node.op, ast.And) else any(values))
        case ast.Compare(left=left, ops=[op], comparators=[right]) | ast.BinOp(left=left, op=op, right=right):
            result = int(_ACTIONS[type(op)](_number(left), _number(right)))
        case _:
            raise ValueError(ast.dump(node)[:60])
    if abs(result) >= MOST_NUMBER:
        raise ValueError("a number is too large")
    return result
