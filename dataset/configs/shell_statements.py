"""The statements of a shell script, as a tree: a script is parsed, never executed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.shell_values import part_end

MOST_TOKENS = 200_000
MOST_DEPTH = 40  # of statements within statements
_BLANK = re.compile(r"(?:[ \t\r]|\\\n|#[^\n]*)+")
_REDIRECTION = re.compile(r"\d*(?:<<<|>>|>&|<&|&>|<(?!<)|>)[ \t]*")
_HEREDOC = re.compile(r"\d*<<-?[ \t]*(['\"]?)([A-Za-z_][\w.-]*)\1")
_FUNCTION = re.compile(r"(?:function[ \t]+([\w-]+)[ \t]*(?:\([ \t]*\))?|([\w-]+)[ \t]*\([ \t]*\))\s*\{")
_ARITHMETIC = re.compile(r"\(\(.*?\)\)(?!\))", re.DOTALL)
_END = re.compile(r"&&|\|\||;;|[|&;()\n]")
_ALONE = ("if", "then", "elif", "else", "while", "until", "do", "{")  # words before a statement
_WITHIN = ("then", "elif", "else", "fi", "do", "done", "esac", "}")  # words that a statement cannot begin with


class Array(str):
    """A word ``NAME=`` or ``NAME+=`` with the words in the brackets after it."""

    items: list[str]


@dataclass
class Statement:
    """A command with its words as written, or a statement that holds others.

    Attributes:
        words: Of the command; of a ``for`` or ``case`` its first line.
        documents: Here-documents: a quote, if nothing in it is substituted, and the text.
        end: Operator after it.
        place: Where the words begin and end in the text.
        kind: Of a statement that holds others its first word, ``(`` or ``function``; else empty.
        parts: Statements that it holds: conditions and bodies in turn, an ``else`` last.
        patterns: Of each branch of a ``case``.
        name: Of a function.
    """

    words: list[str] = field(default_factory=list)
    documents: list[tuple[str, str]] = field(default_factory=list)
    end: str = ""
    place: tuple[int, int] = (0, 0)
    kind: str = ""
    parts: list[list[Statement]] = field(default_factory=list)
    patterns: list[list[str]] = field(default_factory=list)
    name: str = ""


def parse(text: str, *, placed: bool = False) -> list[Statement]:
    """The statements of a script, with their places if they are wanted.

    Raises:
        JobError: If a quote, a bracket or a statement is left open, or the script is too long.
    """
    flat = _flat_statements(text)
    for one in flat if not placed else ():
        one.place = (0, 0)
    return _Tree(flat).block((), 0)


def _flat_statements(text: str) -> list[Statement]:
    """Words up to each operator; words such as ``if`` and ``then`` are statements of their own."""
    found, waiting = [Statement()], list[tuple[Statement, str, str]]()  # here-documents whose text follows the line
    at = count = 0
    while at < len(text):
        now = found[-1]
        in_test = "[[" in now.words and "]]" not in now.words  # && and || within its brackets belong to it
        if (count := count + 1) > MOST_TOKENS:
            raise JobError(f"a script must have at most {MOST_TOKENS} words")
        if part := _BLANK.match(text, at):
            at = part.end()
        elif part := _HEREDOC.match(text, at):
            at = part.end()
            waiting.append((now, part[1], part[2]))
        elif part := _REDIRECTION.match(text, at):
            at = _word_end(text, part.end())
        elif not now.words and (part := _FUNCTION.match(text, at)):
            at, now.name, now.kind = part.end(), part[1] or part[2], "function"
            found.append(Statement())
        elif text[at] == "(" and now.words and now.words[-1].endswith("="):
            now.words[-1], at = _array(now.words[-1], text, at + 1)
        elif part := _ARITHMETIC.match(text, at) or (_END.match(text, at) if in_test and text[at] != "\n" else None):
            at = part.end()
            now.words.append(part[0])
        elif part := _END.match(text, at):
            at, now.end = part.end(), part[0]
            for statement, quote, delimiter in waiting if now.end == "\n" else ():
                end = re.compile(rf"^\s*{re.escape(delimiter)}\s*$", re.MULTILINE).search(text, at)
                lines = text[at : end.start() if end else len(text)].removesuffix("\n")
                statement.documents.append((quote, lines))
                at = end.end() + 1 if end else len(text)
            waiting = [] if now.end == "\n" else waiting
            found.append(Statement())
        elif (end_of_word := _word_end(text, at)) > at:
            now.words.append(text[at:end_of_word])
            at, now.place = end_of_word, (now.place[0] if len(now.words) > 1 else at, end_of_word)
            if now.words[0] in _ALONE and len(now.words) == 1:
                found.append(Statement())
        else:
            raise JobError(f"a here-document of a script needs a delimiter, got {text[at + 2 : at + 42]!r}")
    return found


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


class _Tree:
    """Puts statements into those that hold them."""

    def __init__(self, flat: list[Statement]) -> None:
        self._flat, self._at = flat, 0

    def block(self, ends: tuple[str, ...], depth: int) -> list[Statement]:
        """Statements up to a word that ends them, or with an operator that does."""
        if depth > MOST_DEPTH:
            raise JobError(f"statements of a script must be nested at most {MOST_DEPTH} deep")
        found = list[Statement]()
        while self._at < len(self._flat):
            one, first = self._flat[self._at], "".join(self._flat[self._at].words[:1])
            if first in ends:
                return found
            if first in _WITHIN:
                raise JobError(f"a script's {first} must end a statement that it belongs to")
            self._at += 1
            found.append(one)
            self._fill(one, first, depth + 1)
            if one.end in ends:
                return found
        if ends:
            raise JobError(f"a script's statement must be closed by {ends[-1]}, got the end of the file")
        return found

    def _fill(self, one: Statement, first: str, depth: int) -> None:
        """Read what a statement holds, up to its end."""
        if one.kind == "function" or first == "{":
            one.kind, one.parts = one.kind or "{", [self.block(("}",), depth)]
            self._close(one)
        elif first == "if":
            one.kind = first
            while not one.parts or self._flat[self._at].words[0] == "elif":
                self._at += bool(one.parts)
                one.parts.append(self.block(("then",), depth))
                self._at += 1
                one.parts.append(self.block(("elif", "else", "fi"), depth))
            if self._flat[self._at].words[0] == "else":
                self._at += 1
                one.parts.append(self.block(("fi",), depth))
            self._close(one)
        elif first in ("for", "select", "while", "until"):
            one.kind, one.parts = first, [self.block(("do",), depth)]
            self._at += 1
            one.parts.append(self.block(("done",), depth))
            self._close(one)
        elif first == "case":
            one.kind = first
            self._fill_case(one, depth)
        elif one.end == "(":
            one.kind, one.end, one.parts = "(", "", [self.block((")",), depth)]

    def _fill_case(self, one: Statement, depth: int) -> None:
        words, end = one.words[3:], one.end
        while words[:1] != ["esac"]:
            patterns = words
            while end != ")":
                if self._at >= len(self._flat):
                    raise JobError("a script's statement must be closed by esac, got the end of the file")
                words, end = self._flat[self._at].words, self._flat[self._at].end
                self._at += 1
                if words[:1] == ["esac"]:
                    one.end = end
                    return
                patterns = [*patterns, *words]
            one.patterns.append(patterns)
            one.parts.append(self.block((";;", "esac"), depth))
            words, end = [], ""

    def _close(self, one: Statement) -> None:
        """Pass over the word that ends a statement."""
        one.end = self._flat[self._at].end
        self._at += 1
