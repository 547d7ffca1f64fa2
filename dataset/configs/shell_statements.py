"""The text of a shell script, read statement by statement: quotes, substitutions, arrays and here-documents."""

from __future__ import annotations

import re

from stepsight.dataset.base.errors import JobError

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
    """Reads a text, statement by statement.

    Attributes:
        text: All of it.
        at: Where the next statement begins.
        offset: Where the text begins in the script; -1: it stands elsewhere.
        place: Of the last statement's words in the script; (0, 0): elsewhere.
    """

    def __init__(self, text: str, offset: int) -> None:
        self.text, self.offset, self.at, self.place = text, offset, 0, (0, 0)
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
