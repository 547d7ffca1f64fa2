"""Statements of a shell script, from its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.shell_tokens import Token

MOST_DEPTH = 40  # of statements within statements


@dataclass(frozen=True, slots=True)
class Command:
    """Words of a simple command, or assignments.

    Attributes:
        words: As written.
        arrays: By the place of a word ``NAME=`` or ``NAME+=``: the words between its brackets.
        documents: Here-documents, each with whether nothing in it is substituted.
        after: ``&&``, ``||`` or empty: when the command runs, by what the one before gave.
    """

    words: tuple[str, ...]
    arrays: dict[int, tuple[str, ...]] = field(default_factory=dict)
    documents: tuple[tuple[str, bool], ...] = ()
    after: str = ""


@dataclass(frozen=True, slots=True)
class Branches:
    """``if``: conditions with what follows each; the last condition may be empty (``else``)."""

    cases: tuple[tuple[tuple[Statement, ...], tuple[Statement, ...]], ...]


@dataclass(frozen=True, slots=True)
class Cases:
    """``case``: a word, and patterns with what follows each."""

    word: str
    cases: tuple[tuple[tuple[str, ...], tuple[Statement, ...]], ...]


@dataclass(frozen=True, slots=True)
class Loop:
    """``for``: its variable and words; ``while`` and ``until``: neither."""

    name: str
    words: tuple[str, ...]
    body: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class Function:
    """A function; a group in brackets is one without a name, which runs at once."""

    name: str
    body: tuple[Statement, ...]


Statement: TypeAlias = Command | Branches | Cases | Loop | Function


def shell_statements(tokens: list[Token]) -> tuple[Statement, ...]:
    """Parse a script.

    Raises:
        JobError: If a statement is not closed, or statements are nested too deeply.
    """
    return _Parser(tokens).block(())


class _Parser:
    def __init__(self, tokens: list[Token]) -> None:
        self._tokens, self._at, self._depth = tokens, 0, 0

    def _peek(self) -> Token | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _is(self, text: str, kind: str = "operator") -> bool:
        token = self._peek()
        return token is not None and token.kind == kind and token.text == text

    def _take(self, *texts: str) -> str:
        """Skip ends of statements, and take one of some words."""
        while self._is("\n") or self._is(";"):
            self._at += 1
        token = self._peek()
        if token is None or token.text not in texts:
            raise JobError(f"a script's statement must be closed by {' or '.join(texts)}, got {_shown(token)}")
        self._at += 1
        return token.text

    def block(self, ends: tuple[str, ...]) -> tuple[Statement, ...]:
        """Statements up to one of some words, which is left."""
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise JobError(f"statements of a script must be nested at most {MOST_DEPTH} deep")
        found: list[Statement] = []
        after = ""
        while (token := self._peek()) is not None:
            if token.text in ends:
                break
            if token.kind == "operator" and token.text in ("\n", ";", "&", "|", "&&", "||"):
                self._at += 1
                after = token.text if token.text in ("&&", "||") else after if token.text == "\n" else ""
                continue
            found.append(self._statement(after))
            after = ""
        self._depth -= 1
        return tuple(found)

    def _statement(self, after: str) -> Statement:
        token = self._tokens[self._at]
        if token.kind == "operator":
            self._at += 1
            if token.text == "(":
                body = self.block((")",))
                self._take(")")
                return Function("", body)
            return Command(())  # a stray bracket or redirection says nothing
        match token.text:
            case "if":
                return self._branches()
            case "for" | "while" | "until" | "select":
                return self._loop(token.text)
            case "case":
                return self._cases()
            case "{":
                return self._group("")
            case "function":
                self._at += 2
                return self._group(self._tokens[self._at - 1].text if self._at <= len(self._tokens) else "")
        return self._command(after)

    def _group(self, name: str) -> Function:
        while self._is("(") or self._is(")") or self._is("\n"):
            self._at += 1
        self._take("{")
        body = self.block(("}",))
        self._take("}")
        return Function(name, body)

    def _branches(self) -> Branches:
        cases: list[tuple[tuple[Statement, ...], tuple[Statement, ...]]] = []
        word = self._take("if")
        while word != "fi":
            condition: tuple[Statement, ...] = ()
            if word != "else":
                condition = self.block(("then",))
                self._take("then")
            cases.append((condition, self.block(("elif", "else", "fi"))))
            word = self._take("elif", "else", "fi")
        return Branches(tuple(cases))

    def _loop(self, word: str) -> Loop:
        self._at += 1
        name, words = "", []
        if word in ("for", "select"):
            name = self._tokens[self._at].text if self._peek() else ""
            self._at += 1
        while (token := self._peek()) is not None and token.text != "do":
            words += [token.text] if token.kind == "word" and token.text != "in" and name else []
            self._at += 1
        self._take("do")
        body = self.block(("done",))
        self._take("done")
        return Loop(name, tuple(words), body)

    def _cases(self) -> Cases:
        self._at += 1
        word = self._tokens[self._at].text if self._peek() else ""
        self._at += 1
        self._take("in")
        cases: list[tuple[tuple[str, ...], tuple[Statement, ...]]] = []
        while True:
            while self._is("\n") or self._is(";;") or self._is(";"):
                self._at += 1
            if self._is("esac", "word") or self._peek() is None:
                self._take("esac")
                return Cases(word, tuple(cases))
            patterns: list[str] = []
            while (token := self._peek()) is not None and token.text != ")":
                patterns += [token.text] if token.kind == "word" else []
                self._at += 1
            self._take(")")
            cases.append((tuple(patterns), self.block((";;", "esac"))))

    def _command(self, after: str) -> Statement:
        words: list[str] = []
        arrays: dict[int, tuple[str, ...]] = {}
        documents: list[tuple[str, bool]] = []
        while (token := self._peek()) is not None:
            if token.kind == "heredoc":
                documents.append((token.text, token.quoted))
            elif token.kind == "word":
                words.append(token.text)
            elif token.text == "(" and words and words[-1].endswith("="):
                self._at += 1
                arrays[len(words) - 1] = self._array()
                continue
            elif token.text == "(" and len(words) == 1:
                return self._group(words[0])
            elif token.text in ("<", ">", ">>", ">&", "<&", "&>", "<<<"):
                self._at += 2 if self._at + 1 < len(self._tokens) and self._tokens[self._at + 1].kind == "word" else 1
                continue
            else:
                break
            self._at += 1
        if words and words[0] == "[[":  # && and || within its brackets belong to the test
            words += self._rest_of_test(words)
        return Command(tuple(words), arrays, tuple(documents), after)

    def _rest_of_test(self, words: list[str]) -> list[str]:
        rest: list[str] = []
        while "]]" not in (*words, *rest) and (token := self._peek()) is not None:
            rest.append(token.text)
            self._at += 1
        return rest

    def _array(self) -> tuple[str, ...]:
        words: list[str] = []
        while (token := self._peek()) is not None and not self._is(")"):
            words += [token.text] if token.kind == "word" else []
            self._at += 1
        self._take(")")
        return tuple(words)


def _shown(token: Token | None) -> str:
    return "the end of the file" if token is None else f"{token.text!r:.60}"
