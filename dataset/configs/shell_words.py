"""The words of a shell script, statement by statement, and what they expand to: variables and arithmetic.

What the script does not state, as what a command prints, is one character that stands for a value that is not known.
It stays in every text that is made of it, so that no value is taken for a part of it.
"""

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
_SETS = re.compile(r"\s*([A-Za-z_]\w*)(\[[^\]]*\])?\s*(<<|>>|[-+*/%&|^]?)=(?!=)(.*)", re.DOTALL)  # an expression
_STEPS = re.compile(r"\s*(?:(\+\+|--)\s*([A-Za-z_]\w*)|([A-Za-z_]\w*)\s*(\+\+|--))\s*")
_NAME_SET, _STEP = r"([A-Za-z_]\w*)(?:\[[^\]]*\])?", r"\+\+|--"
_CHANGED = re.compile(rf"{_NAME_SET}\s*(?:(?:<<|>>|[-+*/%&|^]?)=(?!=)|{_STEP})|(?:{_STEP})\s*([A-Za-z_]\w*)")
_FIRST, _MOST_UNKNOWN = 0xE000, 6000  # characters that Unicode leaves to programs
UNKNOWN = re.compile(f"[{chr(_FIRST)}-{chr(_FIRST + _MOST_UNKNOWN)}]")


_ACTIONS: dict[type[ast.AST], Callable[..., Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul},
    **{ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le},
    **{ast.Gt: operator.gt, ast.GtE: operator.ge, ast.USub: operator.neg, ast.UAdd: operator.pos},
    ast.Div: lambda left, right: left // right if (left < 0) == (right < 0) else -(-left // right),  # towards 0
    ast.Mod: lambda left, right: abs(left) % abs(right) * (-1 if left < 0 else 1),
    ast.Pow: lambda left, right: left**right if 0 <= right <= 64 and abs(left) <= 1024 else MOST_NUMBER,
}


def _check_length(what: str, length: int, where: str) -> None:
    if length > LONGEST_VALUE:
        rule = f"a {what} of a script must have at most {LONGEST_VALUE} characters"
        raise JobError(f"{rule}, got {length} in {where!r:.60}")


class Variables:
    """Variables of a script while it is read; those that the user defined keep their values."""

    def __init__(self, defined: dict[str, str]) -> None:
        self.values: dict[str, str | list[str]] = dict(defined)  # a list is an array
        self.unset: dict[str, None] = {}  # that the script uses and does not set, in the order of their first use
        self.integers: set[str] = set()  # that ``declare -i`` made numbers
        self._defined, self._lost = frozenset(defined), set[str]()
        self._unknown: dict[str, str] = {}  # the character that stands for it, by reason

    def unknown(self, why: str) -> str:
        """The character that stands for a value that is not known."""
        return self._unknown.setdefault(why, chr(_FIRST + min(len(self._unknown), _MOST_UNKNOWN)))

    def shown(self, text: str) -> str:
        """A text with what is not known in words."""
        reasons = {mark: f"(not known: {' '.join(why.split()):.60})" for why, mark in self._unknown.items()}
        return UNKNOWN.sub(lambda found: reasons.get(found[0], "?"), text)

    def forget(self, name: str, why: str, *, for_good: bool = False) -> None:
        """Make a variable's value unknown; ``for_good``: whatever the script sets it to later."""
        self.set(name, self.unknown(why))
        self._lost |= {name} if for_good else set()

    def set(self, name: str, value: str | list[str], *, add: bool = False) -> None:
        """Set a variable, or append to it."""
        if name in self._defined or name in self._lost:
            return
        old = self.values.get(name)
        if name in self.integers and isinstance(value, str):
            value, add = self.arithmetic(f"({old or 0}) + ({value})" if add else value), False
        if add and isinstance(value, list):
            value = [*(old if isinstance(old, list) else [old] if old else []), *value]
        elif add and isinstance(value, str):
            value = [*old, value] if isinstance(old, list) else (old or "") + value
        _check_length("variable", sum(map(len, value)), name)
        self.values[name] = value

    def set_item(self, name: str, index: str, value: str, *, add: bool = False) -> None:
        """Set an item of an array; with an index that is no number the array is not known."""
        old, place = self.values.get(name, []), self.arithmetic(index)
        if not isinstance(old, list) or not place.isdecimal() or int(place) > len(old):
            self.forget(name, f"{name}[{index}]={value}")
        else:
            at = int(place)
            self.set(name, [*old[:at], ("".join(old[at : at + 1]) if add else "") + value, *old[at + 1 :]])

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
        """Parts of a written word, and whether blanks in a part do not end the word."""
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
            elif char == "`" or raw.startswith("$(", start):
                pieces = [(self.unknown(raw[start:at]), True)]
            else:
                named, plain = _NAME.match(raw, start), _PLAIN.match(raw, start)
                pieces = [(self.text(named[1]), quoted) if named else (plain[0] if plain else char, True)]
                at = named.end() if named else plain.end() if plain else start + 1
            length += sum(len(text) for text, _ in pieces)
            _check_length("word", length, raw)
            yield from pieces

    def _braces(self, text: str, quoted: bool) -> list[tuple[str, bool]]:
        """Parts of ``${text}``."""
        found = _IN_BRACES.fullmatch(text)
        if found is None:
            return []
        length, name, index, colon, kind, default, other = found.groups()
        value = self.values.get(name)
        if other:  # a part of a value, or one with replaced words: not worked out here
            return [(self.unknown(f"${{{text}}}") if value else "", quoted)]
        if length:
            unknown = UNKNOWN.search("".join(value or ""))
            return [(self.unknown(f"${{{text}}}") if unknown else str(len(value or "")), True)]
        if index in ("[@]", "[*]") and found.end(3) == len(text):
            items = value if isinstance(value, list) else [value] if value else []
            return [piece for item in items for piece in ((" ", False), (item, quoted))][1:]
        if isinstance(value, list) and index is not None:
            place = self.arithmetic(index[1:-1])
            known = place.lstrip("-").isdecimal() and -len(value) <= int(place)
            value = (value[int(place)] if int(place) < len(value) else "") if known else self.unknown(f"${{{text}}}")
        given = bool(value) if colon else value is not None
        if kind is not None and (kind == "+" or not given):
            taken = self.joined(default) if (kind == "+") == given and kind != "?" else ""
            if kind == "=":
                self.set(name, taken)
            return [(taken, quoted)]
        return [(self.text(name) if index is None else str(value or ""), quoted)]

    def arithmetic(self, text: str) -> str:
        """The value of ``$(( text ))``, which may set variables; unknown with a variable that is not set."""
        *parts, last = text.split(",")
        for part in parts:
            self.arithmetic(part)
        if steps := _STEPS.fullmatch(last):
            name, sign = steps[2] or steps[3], (steps[1] or steps[4])[0]
            self.set(name, self.arithmetic(f"{name} {sign} 1"))
            value = self._number(name if steps[1] else f"{name} {'-' if sign == '+' else '+'} 1")
        elif sets := _SETS.fullmatch(last):
            name, index, sign, rest = sets.groups()
            value = self.arithmetic(f"({name}{index or ''}) {sign} ({rest})" if sign else rest)
            if index:
                self.set_item(name, index[1:-1], value)
            else:
                self.set(name, value)
        else:
            changed = [name for pair in _CHANGED.findall(last) for name in pair if name]  # within an expression
            value = None if changed else self._number(last)
            for name in changed:
                self.forget(name, f"(({text}))")
        return self.unknown(f"(({text}))") if value is None else value

    def _number(self, text: str) -> str | None:
        """The value of an expression that sets nothing; None: not known."""
        unset = any(not self.values.get(name) for found in _NAMES.findall(text) for name in found if name)
        if unset or "#" in text or "//" in text or "$(" in text.replace("$((", "") or "`" in text:
            return None
        text = self.joined(text.strip())
        for _ in range(4):  # a variable may hold an expression
            text = re.sub(r"(?<![\w.])[A-Za-z_]\w*", lambda found: self.text(found[0]) or "unknown", text)
        try:
            return str(_number(ast.parse(text.replace("&&", " and ").replace("||", " or ").strip(), mode="eval").body))
        except (SyntaxError, ValueError, KeyError, ZeroDivisionError, RecursionError, MemoryError):
            return None


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


_BLANK = re.compile(r"(?:[ \t\r]|\\\n|#[^\n]*)+")
_REDIRECTION = re.compile(r"\d*(?:<<<|>>|>&|<&|&>|<(?!<)|>)[ \t]*")
_DOCUMENT = re.compile(r"\d*<<-?[ \t]*(['\"]?)([A-Za-z_][\w.-]*)\1")
_FUNCTION = re.compile(r"(?:function[ \t]+([\w-]+)[ \t]*(?:\([ \t]*\))?|([\w-]+)[ \t]*\([ \t]*\))\s*\{")
_ARITHMETIC = re.compile(r"\(\(.*?\)\)(?!\))", re.DOTALL)
_END = re.compile(r"&&|\|\||;;|[|&;()\n]")
WITHIN = ("then", "elif", "else", "fi", "do", "done", "esac", "}")  # words that belong to another statement
_ALONE = ("if", "while", "until", "{", *WITHIN)  # words before a statement


class Array(str):
    """A word ``NAME=`` or ``NAME+=`` with the words in the brackets after it."""

    items: list[str]


class Scanner:
    """Reads a text, statement by statement; it begins at ``offset`` in the script, at -1 if it stands elsewhere."""

    def __init__(self, text: str, offset: int) -> None:
        self.text, self.offset = text, offset
        self.at, self.place = 0, (0, 0)  # of the next statement; of the last one's words in the script, if it is there
        self._after = dict[int, int]()  # by the end of a line: the end of its here-documents

    @property
    def more(self) -> bool:
        """Whether something is left."""
        return self.at < len(self.text)

    def statement(self) -> tuple[list[str], list[tuple[str, str]], str]:
        """The next statement, or its first word if that stands before others.

        Returns:
            Its words as written; its here-documents (a quote, if nothing in it is substituted, and the text); the
            operator after it.
        """
        text, at, words, documents = self.text, self.at, list[str](), list[tuple[str, str]]()
        end = ""
        while not end and at < len(text) and not (len(words) == 1 and words[0] in _ALONE):
            in_test = "[[" in words and "]]" not in words and text[at] != "\n"  # && and || in it belong to it
            if part := _BLANK.match(text, at):
                at = part.end()
            elif part := _DOCUMENT.match(text, at):
                at, line = part.end(), text.find("\n", part.end())
                start = self._after.get(line, line + 1 or len(text))
                last = re.compile(rf"^\s*{re.escape(part[2])}\s*$", re.MULTILINE).search(text, start)
                documents.append((part[1], text[start : last.start() if last else len(text)].removesuffix("\n")))
                self._after[line] = last.end() + 1 if last else len(text)
            elif part := _REDIRECTION.match(text, at):
                at = _word_end(text, part.end())
            elif not words and (part := _FUNCTION.match(text, at)):
                at, words = part.end(), ["function", part[1] or part[2]]
                break
            elif text[at] == "(" and words and words[-1].endswith("="):
                words[-1], at = _array(words[-1], text, at + 1)
            elif part := _ARITHMETIC.match(text, at) or (_END.match(text, at) if in_test else None):
                at = part.end()
                words.append(part[0])
            elif part := _END.match(text, at):
                at, end = self._after.get(at, part.end()), part[0]
            elif (end_of_word := _word_end(text, at)) > at:
                words.append(text[at:end_of_word])
                place = (self.place[0] if len(words) > 1 else at + self.offset, end_of_word + self.offset)
                at, self.place = end_of_word, place if self.offset >= 0 else (0, 0)
            else:
                raise JobError(f"a here-document of a script needs a delimiter, got {text[at + 2 : at + 42]!r}")
        self.at = at
        return words, documents, end


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


def _word_end(text: str, at: int) -> int:
    while at < len(text) and text[at] not in " \t\r\n;&|<>()":
        at = part_end(text, at)
    if at > len(text):
        raise JobError("a quote or a bracket of the script is never closed")
    return at


def _array(name: str, text: str, at: int) -> tuple[Array, int]:
    """A word with the items of the array after it, and the place after its bracket."""
    word = Array(name)
    word.items = []
    while at < len(text) and text[at] != ")":
        blank, end = _BLANK.match(text, at), _word_end(text, at) if text[at] != "#" else at
        if blank is None and end > at:
            word.items.append(text[at:end])
        at = blank.end() if blank else max(end, at + 1)
    if at >= len(text):
        raise JobError("a script's statement must be closed by ), got the end of the file")
    return word, at + 1
