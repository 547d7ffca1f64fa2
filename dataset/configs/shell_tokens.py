"""Words and operators of a shell script, as they are written: nothing is substituted, nothing is run."""

from __future__ import annotations

import re
from dataclasses import dataclass

from stepsight.dataset.base.errors import JobError

MOST_TOKENS = 200_000
_OPERATORS = ("&&", "||", ";;", "<<<", "<<", ">>", ">&", "<&", "&>", "|", "&", ";", "(", ")", "<", ">", "\n")
_HEREDOC = re.compile(r"(-?)[ \t]*(['\"]?)([A-Za-z_][\w.-]*)\2")
_CLOSING = {"(": ")", "{": "}"}


@dataclass(frozen=True, slots=True)
class Token:
    """A word with its quotes, an operator, or a here-document.

    Attributes:
        kind: ``word``, ``operator`` or ``heredoc``.
        text: The word as written, the operator, or the text of the document.
        quoted: Of a here-document: whether its delimiter is quoted, so that nothing in it is substituted.
    """

    kind: str
    text: str
    quoted: bool = False


def shell_tokens(text: str) -> list[Token]:
    """Split a script into tokens.

    Raises:
        JobError: If a quote or a bracket is left open, or the script is too long.
    """
    return _Tokenizer(text).run()


class _Tokenizer:
    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._tokens: list[Token] = []
        self._documents: list[tuple[str, bool]] = []  # here-documents whose text follows the line

    def run(self) -> list[Token]:
        while self._at < len(self._text):
            self._step()
            if len(self._tokens) > MOST_TOKENS:
                raise JobError(f"a script must have at most {MOST_TOKENS} words")
        return self._tokens

    def _step(self) -> None:
        char = self._text[self._at]
        if char in " \t\r":
            self._at += 1
        elif self._text.startswith("\\\n", self._at):  # the line goes on
            self._at += 2
        elif char == "#":  # to the end of the line, even after a backslash
            end = self._text.find("\n", self._at)
            self._at = len(self._text) if end < 0 else end
        elif operator := next((o for o in _OPERATORS if self._text.startswith(o, self._at)), ""):
            if operator[0] in "<>" and self._text[max(0, self._at - 1)].isdigit() and self._tokens[-1].text.isdigit():
                self._tokens.pop()  # the number of a stream, as in 2>&1
            self._at += len(operator)
            if operator == "<<":
                self._open_document()
                return
            self._tokens.append(Token("operator", operator))
            if operator == "\n":
                self._read_documents()
        else:
            self._tokens.append(Token("word", self._word()))

    def _open_document(self) -> None:
        found = _HEREDOC.match(self._text, self._at)
        if found is None:
            raise JobError(f"a here-document needs a delimiter, got {self._text[self._at : self._at + 40]!r}")
        self._at = found.end()
        self._documents.append((found[3], bool(found[2])))

    def _read_documents(self) -> None:
        for delimiter, quoted in self._documents:
            lines: list[str] = []
            while self._at < len(self._text):
                end = self._text.find("\n", self._at)
                end = len(self._text) if end < 0 else end
                line, self._at = self._text[self._at : end], end + 1
                if line.strip() == delimiter:
                    break
                lines.append(line)
            newline = self._tokens.pop()  # the document belongs to the command before the end of the line
            self._tokens += [Token("heredoc", "\n".join(lines), quoted), newline]
        self._documents.clear()

    def _word(self) -> str:
        start = self._at
        while self._at < len(self._text):
            char = self._text[self._at]
            if char in " \t\r\n;&|<>()":
                break
            self._at = self._after(self._at)
        return self._text[start : self._at]

    def _after(self, at: int) -> int:
        """The place after a character, a quoted text or a substitution."""
        text, char = self._text, self._text[at]
        if char == "\\":
            return min(at + 2, len(text))
        if char in "'`":
            return self._find(char, at + 1) + 1
        if char == '"':
            at += 1
            while at < len(text) and text[at] != '"':
                at = at + 2 if text[at] == "\\" else self._after(at) if text[at] in "$`" else at + 1
            return self._closed(at) + 1
        if char == "$" and at + 1 < len(text) and text[at + 1] in _CLOSING:
            opening = text[at + 1]
            depth, at = 1, at + 2
            while at < len(text) and depth:
                depth += (text[at] == opening) - (text[at] == _CLOSING[opening])
                at = self._after(at) if text[at] in "'\"\\" and opening == "(" else at + 1
            return self._closed(at - 1) + 1
        return at + 1

    def _find(self, char: str, at: int) -> int:
        found = self._text.find(char, at)
        return self._closed(len(self._text) if found < 0 else found)

    def _closed(self, at: int) -> int:
        if at >= len(self._text):
            raise JobError("a quote or a bracket of the script is never closed")
        return at
