"""Values of a shell script's words: variables and arithmetic, from what the script itself states."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

from stepsight.dataset.base.errors import JobError

LONGEST_VALUE = 2**20  # characters; a variable that holds itself twice doubles with every line
MOST_NUMBER = 2**63
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_IN_BRACES = re.compile(r"(#?)([A-Za-z_]\w*|[0-9@*]+)(\[[^\]]*\])?(.*)", re.DOTALL)
_QUOTED_ITEMS = re.compile(r'"(?:\$\{(\w+)\[@\]\}|\$@)"')  # no words where there are no items
_ACTIONS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


class Variables:
    """Variables of a script while it is read.

    Attributes:
        values: By name; a list is an array.
        unset: Names that the script uses and does not set, in the order of their first use.
    """

    def __init__(self, defined: dict[str, str]) -> None:
        self.values: dict[str, str | list[str]] = dict(defined)
        self.unset: dict[str, None] = {}
        self._defined = frozenset(defined)

    def set(self, name: str, value: str | list[str], *, add: bool = False) -> None:
        """Set a variable, or append to it; variables that the user defined keep their values."""
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
        if value is None:
            if name.isidentifier():
                self.unset[name] = None
            return ""
        return " ".join(value) if isinstance(value, list) else value

    def expanded(self, raw: str) -> list[str]:
        """The words that a written word expands to."""
        if (found := _QUOTED_ITEMS.fullmatch(raw)) is not None and not self.values.get(found[1] or "@"):
            return []
        return _Expansion(self, raw).words()

    def joined(self, raw: str) -> str:
        """The text that a written word expands to, without splitting, as in an assignment."""
        return " ".join(_Expansion(self, raw, split=False).words())

    def substituted(self, text: str) -> str:
        """A here-document with its variables."""
        return _Expansion(self, text, split=False, quotes=False).whole()


class _Expansion:
    def __init__(self, variables: Variables, raw: str, *, split: bool = True, quotes: bool = True) -> None:
        self._variables, self._raw, self._at = variables, raw, 0
        self._split, self._quotes = split, quotes
        self._words: list[str] = []
        self._word: str | None = None
        self._length = 0

    def words(self) -> list[str]:
        quoted = False
        while self._at < len(self._raw):
            char = self._raw[self._at]
            if char == "\\" and self._at + 1 < len(self._raw):
                if self._raw[self._at + 1] != "\n":  # otherwise the line goes on
                    self._add(self._raw[self._at + 1])
                self._at += 2
            elif char == "'" and self._quotes and not quoted:
                end = self._raw.find("'", self._at + 1)
                self._add(self._raw[self._at + 1 : end])
                self._at = end + 1
            elif char == '"' and self._quotes:
                quoted = not quoted
                self._add("")
                self._at += 1
            elif char in "$`":
                self._substitute(quoted)
            else:
                self._add(char)
                self._at += 1
        return [*self._words, self._word] if self._word is not None else self._words

    def whole(self) -> str:
        return " ".join(self.words())

    def _add(self, text: str) -> None:
        self._length += len(text)
        if self._length > LONGEST_VALUE:
            raise JobError(f"a word of a script must have at most {LONGEST_VALUE} characters, got {self._raw!r:.60}")
        self._word = (self._word or "") + text

    def _add_parts(self, value: str, quoted: bool) -> None:
        """Add a variable's value: unquoted, blanks in it end words."""
        if quoted or not self._split:
            self._add(value)
            return
        parts = value.split()
        for index, part in enumerate(parts):
            if (index or value[:1].isspace()) and self._word is not None:
                self._words.append(self._word)
                self._word = None
            self._add(part)
        if parts and value[-1].isspace() and self._word is not None:
            self._words.append(self._word)
            self._word = None

    def _substitute(self, quoted: bool) -> None:
        raw, at = self._raw, self._at
        if raw[at] == "`":
            self._at = raw.find("`", at + 1) + 1 or len(raw)
            return
        if raw.startswith("$((", at):
            end = _closing(raw, at + 1, "()")
            self._at = end + 1
            self._add(arithmetic(raw[at + 3 : end - 1], self._variables))
        elif raw.startswith("$(", at):
            self._at = _closing(raw, at + 1, "()") + 1  # what a command would print is not known
        elif raw.startswith("${", at):
            end = _closing(raw, at + 1, "{}")
            self._at = end + 1
            self._braces(raw[at + 2 : end], quoted)
        else:
            found = _NAME.match(raw, at + 1)
            self._at = found.end() if found else at + 1
            if found is None:
                self._add("$")
            else:
                self._add_parts(self._variables.text(found[0]), quoted)

    def _braces(self, text: str, quoted: bool) -> None:
        found = _IN_BRACES.fullmatch(text)
        if found is None:
            return
        length, name, index, rest = found.groups()
        value = self._variables.values.get(name)
        if length:
            self._add(str(len(value) if value is not None else 0))
            return
        if index in ("[@]", "[*]") and not rest:
            items = value if isinstance(value, list) else [value] if value else []
            self._add_items(items, quoted)
            return
        if isinstance(value, list) and index is not None:
            place = arithmetic(index[1:-1], self._variables)
            value = value[int(place)] if place.lstrip("-").isdigit() and int(place) < len(value) else ""
        if rest[:2] in (":-", ":=", ":+", ":?") or rest[:1] in ("-", "=", "+", "?"):
            kind, default = (rest[1], rest[2:]) if rest[0] == ":" else (rest[0], rest[1:])
            given = bool(value) if rest[0] == ":" else value is not None
            if kind == "+":
                self._add_parts(self._variables.joined(default) if given else "", quoted)
                return
            if not given:
                self._add_parts(self._variables.joined(default) if kind != "?" else "", quoted)
                return
        self._add_parts(self._variables.text(name) if index is None else str(value or ""), quoted)

    def _add_items(self, items: Sequence[str], quoted: bool) -> None:
        for number, item in enumerate(items):
            if number and self._word is not None:
                self._words.append(self._word)
                self._word = None
            self._add_parts(item, quoted)


def _closing(text: str, at: int, pair: str) -> int:
    """The place of the bracket that closes the one at a place."""
    depth = 0
    for place in range(at, len(text)):
        depth += (text[place] == pair[0]) - (text[place] == pair[1])
        if depth == 0:
            return place
    return len(text)


def arithmetic(text: str, variables: Variables) -> str:
    """The value of ``$(( text ))``; empty where it is not known, as with a variable that is not set."""
    if "$(" in text.replace("$((", "") or "`" in text or _has_unknown(text, variables):
        return ""
    text = variables.joined(text.strip())
    for _ in range(4):  # a variable may hold an expression
        text = re.sub(r"(?<![\w.])[A-Za-z_]\w*", lambda found: variables.text(found[0]) or "unknown", text)
    try:
        value = _number(ast.parse(text.replace("&&", " and ").replace("||", " or ").strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return ""
    return str(int(value))


def _has_unknown(text: str, variables: Variables) -> bool:
    """Whether an expression uses a variable that has no value; one with a default (``${N:-1}``) has one."""
    names = re.findall(r"\$\{(\w+)\}|\$([A-Za-z_]\w*)|(?<![\w$.{])([A-Za-z_]\w*)", text)
    return any(not variables.values.get(name) for found in names for name in found if name)


def _number(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < MOST_NUMBER:
        return node.value
    if isinstance(node, ast.UnaryOp) and type(node.op) in _ACTIONS:
        return int(_ACTIONS[type(node.op)](_number(node.operand)))
    if isinstance(node, ast.BoolOp):
        values = [_number(value) != 0 for value in node.values]
        return int(all(values) if isinstance(node.op, ast.And) else any(values))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _ACTIONS:
        return int(_ACTIONS[type(node.ops[0])](_number(node.left), _number(node.comparators[0])))
    if isinstance(node, ast.BinOp):
        left, right = _number(node.left), _number(node.right)
        if isinstance(node.op, ast.Div | ast.FloorDiv):
            return int(abs(left) // abs(right)) * (1 if (left < 0) == (right < 0) else -1)
        if isinstance(node.op, ast.Pow) and 0 <= right <= 64 and abs(left) <= 1024:
            return int(left**right)
        if type(node.op) in _ACTIONS:
            result = int(_ACTIONS[type(node.op)](left, right))
            if abs(result) < MOST_NUMBER:
                return result
    raise ValueError(ast.dump(node)[:60])
