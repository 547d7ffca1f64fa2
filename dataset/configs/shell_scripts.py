"""The commands that a shell script would run, with their words: it is read, never executed.

What a command prints, files and the environment are not known.  A test that needs them counts as false, a loop's body
is read once, with the loop's first word.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from stepsight.dataset.base.bounded import read_text
from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.shell_values import Variables, part_end

MOST_TOKENS, MOST_COMMANDS = 200_000, 20_000
MOST_DEPTH, _MOST_CALLS = 40, 20  # of statements within statements; of functions that call each other
_TOKEN = re.compile(r"([ \t\r]|\\\n|#[^\n]*)|&&|\|\||;;|<<<|<<|>>|>&|<&|&>|[|&;()<>\n]")
_HEREDOC = re.compile(r"(-?)[ \t]*(['\"]?)([A-Za-z_][\w.-]*)\2")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=(.*)", re.DOTALL)
_DECLARE = ("export", "declare", "local", "readonly", "typeset")
_SILENT = (
    *("true", "false", ":", "echo", "printf", "mkdir", "cd", "set", "exit", "return", "rm", "cp", "shift", "unset"),
    *("trap", "ulimit"),
)
_COMPARE = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}
_SBATCH = re.compile(r"^\s*#SBATCH\s+(.*?)\s*$", re.MULTILINE)


@dataclass
class ShellScript:
    """What a script would run."""

    commands: list[list[str]] = field(default_factory=list)  # words of every command, in their order
    documents: list[str] = field(default_factory=list)  # texts of here-documents
    variables: dict[str, str | list[str]] = field(default_factory=dict)  # at its end
    unset: list[str] = field(default_factory=list)  # variables that it uses and does not set
    undecided: list[str] = field(default_factory=list)  # conditions that need files or programs; they count as false
    batch_options: list[str] = field(default_factory=list)  # words of its #SBATCH lines


def read_script(text: str, defined: dict[str, str] | None = None, folder: Path | None = None) -> ShellScript:
    """Follow a script's variables, conditions and functions to the commands that it would run.

    Args:
        text: Of the script.
        defined: Variables that the user sets; they win over the script's own.
        folder: Of the script: files in it that the script sources are read too.

    Raises:
        JobError: If the script cannot be parsed, or is too large.
    """
    variables = Variables(dict(defined or {}))
    reading = _Reading(variables, folder)
    reading.run(_tokens(text))
    script = reading.script
    script.variables, script.unset = variables.values, list(variables.unset)
    for line in _SBATCH.findall(text):
        script.batch_options += _split(line.partition(" #")[0])
    return script


class _Token(NamedTuple):
    """A word as written, an ``operator``, a here-``document`` (``literal``: nothing in it is substituted), the end."""

    kind: str
    text: str


def _tokens(text: str) -> list[_Token]:
    """Split a script into tokens.

    Raises:
        JobError: If a quote or a bracket is left open, or the script is too long.
    """
    tokens: list[_Token] = []
    documents: list[tuple[str, bool]] = []  # here-documents whose text follows the line
    at = 0
    while at < len(text):
        if len(tokens) > MOST_TOKENS:
            raise JobError(f"a script must have at most {MOST_TOKENS} words")
        start, found = at, _TOKEN.match(text, at)
        if found is None:
            while at < len(text) and text[at] not in " \t\r\n;&|<>()":
                at = part_end(text, at)
            if at > len(text):
                raise JobError("a quote or a bracket of the script is never closed")
            tokens.append(_Token("word", text[start:at]))
            continue
        at, operator = found.end(), found[0]
        if found[1] is not None:
            continue
        if operator[0] in "<>" and text[max(0, start - 1)].isdigit() and tokens[-1].text.isdigit():
            tokens.pop()  # the number of a stream, as in 2>&1
        if operator == "<<":
            named = _HEREDOC.match(text, at)
            if named is None:
                raise JobError(f"a here-document of a script needs a delimiter, got {text[at : at + 40]!r}")
            at = named.end()
            documents.append((named[3], bool(named[2])))
            continue
        if operator == "\n":  # documents belong to the command before the end of the line
            for delimiter, literal in documents:
                end = re.compile(rf"^\s*{re.escape(delimiter)}\s*$", re.MULTILINE).search(text, at)
                lines = text[at : end.start() if end else len(text)]
                tokens.append(_Token("literal" if literal else "document", lines.removesuffix("\n")))
                at = end.end() + 1 if end else len(text)
            documents.clear()
        tokens.append(_Token("operator", operator))
    return tokens


class _Reading:
    """Reads the tokens of a script, and follows those statements that would run (``runs``)."""

    def __init__(self, variables: Variables, folder: Path | None) -> None:
        self.script, self._variables, self._folder = ShellScript(), variables, folder
        self._functions: dict[str, list[_Token]] = {}
        self._tokens: list[_Token] = []
        self._at = self._depth = self._calls = 0
        self._sourced: set[Path] = set()

    def run(self, tokens: list[_Token]) -> None:
        """Read all statements of some tokens."""
        outer = self._tokens, self._at, self._depth
        self._tokens, self._at, self._depth = [*tokens, _Token("end", "")], 0, 0
        self._block((), True)
        self._tokens, self._at, self._depth = outer

    @property
    def _now(self) -> _Token:
        return self._tokens[self._at]

    def _next(self) -> str:
        """The text of the current token, which is taken; empty at the end, which stays."""
        text = self._now.text
        self._at += self._now.kind != "end"
        return text

    def _skip(self, *operators: str) -> None:
        while self._now.kind == "operator" and self._now.text in operators:
            self._at += 1

    def _take(self, *texts: str) -> str:
        """Skip ends of statements, and take one of some words."""
        self._skip("\n", ";")
        if self._now.text not in texts:
            shown = "the end of the file" if self._now.kind == "end" else f"{self._now.text!r:.60}"
            raise JobError(f"a script's statement must be closed by {' or '.join(texts)}, got {shown}")
        return self._next()

    def _until(self, text: str) -> list[str]:
        """The words before a token, which is left."""
        words = []
        while (token := self._now).kind != "end" and token.text != text:
            words += [token.text] if token.kind == "word" else []
            self._at += 1
        return words

    def _block(self, ends: tuple[str, ...], runs: bool) -> bool:
        """Read statements up to one of some words, which is left; return whether the last command succeeds."""
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise JobError(f"statements of a script must be nested at most {MOST_DEPTH} deep")
        last, after = True, ""
        while (token := self._now).kind != "end" and token.text not in ends:
            if token.kind == "operator" and token.text in ("\n", ";", "&", "|", "&&", "||"):
                self._at += 1
                after = token.text if token.text in ("&&", "||") else after if token.text == "\n" else ""
                continue
            last = self._statement(token, runs, last, after)
            after = ""
        self._depth -= 1
        return last

    def _statement(self, token: _Token, runs: bool, last: bool, after: str) -> bool:
        match token:
            case ("operator", "("):
                self._at += 1
                if self._now == ("operator", "("):
                    return self._arithmetic(runs)
                last = self._block((")",), runs)
                self._take(")")
                return last
            case ("word", "if"):
                return self._branches(runs)
            case ("word", "for" | "while" | "until" | "select"):
                return self._loop(runs)
            case ("word", "case"):
                return self._cases(runs)
            case ("word", "{"):
                return self._group("", runs)
            case ("word", "function"):
                self._at += 1
                return self._group(self._next(), runs)
            case ("operator", _):
                self._at += 1  # a stray bracket or redirection says nothing
                return True
        return self._command(runs and after != ("||" if last else "&&"), last)

    def _arithmetic(self, runs: bool) -> bool:
        """Read ``(( ... ))``, which succeeds if its value is known and not 0."""
        start, depth = self._at, 1
        while depth and self._now.kind != "end":
            depth += (self._now.text == "(") - (self._now.text == ")")
            self._at += 1
        text = " ".join(token.text for token in self._tokens[start : self._at - 1])
        return runs and self._variables.arithmetic(text) not in ("", "0")

    def _group(self, name: str, runs: bool) -> bool:
        """Read a function, or statements in braces."""
        self._skip("(", ")", "\n")
        self._take("{")
        start = self._at
        last = self._block(("}",), runs and not name)
        if name and runs:
            self._functions[name] = self._tokens[start : self._at]
        self._take("}")
        return last

    def _branches(self, runs: bool) -> bool:
        word = self._take("if")
        while word != "fi":
            holds = True
            if word != "else":
                holds = self._block(("then",), runs)
                self._take("then")
            self._block(("elif", "else", "fi"), runs and holds)
            runs = runs and not holds
            word = self._take("elif", "else", "fi")
        return True

    def _loop(self, runs: bool) -> bool:
        name = self._next() if self._next() in ("for", "select") else ""
        words = self._until("do")
        if name and runs:
            items = [item for word in words if word != "in" for item in self._variables.expanded(word)]
            runs = bool(items)
            if items:
                self._variables.set(name, items[0])
        self._take("do")
        self._block(("done",), runs)
        self._take("done")
        return True

    def _cases(self, runs: bool) -> bool:
        self._at += 1
        word = self._variables.joined(self._next()) if runs else self._next()
        self._take("in")
        self._skip("\n", ";;", ";")
        while self._now.kind != "end" and self._now.text != "esac":
            patterns = self._until(")")
            self._take(")")
            fits = runs and any(fnmatchcase(word, self._variables.joined(pattern)) for pattern in patterns)
            self._block((";;", "esac"), fits)
            runs = runs and not fits
            self._skip("\n", ";;", ";")
        self._take("esac")
        return True

    def _command(self, runs: bool, last: bool) -> bool:
        words: list[str] = []
        arrays: dict[int, list[str]] = {}
        documents: list[_Token] = []
        while (token := self._now).kind != "end":
            if token.kind in ("document", "literal"):
                documents.append(token)
            elif token.kind == "word":
                words.append(token.text)
            elif token.text == "(" and words and words[-1].endswith("="):
                self._at += 1
                arrays[len(words) - 1] = self._until(")")
                self._take(")")
                continue
            elif token.text == "(" and len(words) == 1:
                return self._group(words[0], runs)
            elif token.text not in ("<", ">", ">>", ">&", "<&", "&>", "<<<"):
                break
            elif self._tokens[self._at + 1].kind == "word":
                self._at += 1  # the file of a redirection
            self._at += 1
        if words and words[0] == "[[":  # && and || within its brackets belong to the test
            while "]]" not in words and self._now.kind != "end":
                words.append(self._next())
        return self._carry_out(words, arrays, documents) if runs else last

    def _carry_out(self, words: list[str], arrays: dict[int, list[str]], documents: list[_Token]) -> bool:
        variables, script = self._variables, self.script
        for kind, text in documents:
            script.documents.append(text if kind == "literal" else variables.joined(text, quotes=False))
        words = [word for raw in self._assign(words, arrays) for word in variables.expanded(raw)]
        name = words[0] if words else "true"
        if name in ("[", "[[", "test"):
            return self._test(words)
        if name in (".", "source") and len(words) > 1:
            path = None if self._folder is None else self._folder / Path(words[1]).name
            if path is not None and path not in self._sourced and path.is_file():  # others stay unknown
                self._sourced.add(path)
                self.run(_tokens(read_text(path, "utf-8-sig")))
        elif name in self._functions:
            if self._calls < _MOST_CALLS and len(script.commands) < MOST_COMMANDS:
                self._calls += 1
                for number, argument in enumerate(words[1:], 1):
                    variables.set(str(number), argument)
                variables.set("@", words[1:])
                self.run(self._functions[name])
                self._calls -= 1
        elif name not in _SILENT and len(script.commands) < MOST_COMMANDS:
            script.commands.append(_flat(words))
        return name != "false"

    def _assign(self, words: list[str], arrays: dict[int, list[str]]) -> list[str]:
        """Run the assignments at the beginning of a command; return the words after them."""
        for index, raw in enumerate(words):
            found = _ASSIGNMENT.fullmatch(raw)
            if found is not None:
                name, _, plus, value = found.groups()
                items = [word for item in arrays.get(index, ()) for word in self._variables.expanded(item)]
                self._variables.set(name, items if index in arrays else self._variables.joined(value), add=bool(plus))
            elif words[0] not in _DECLARE:  # whose options and names alone say nothing
                return words[index:]
        return []

    def _test(self, words: list[str]) -> bool:
        """The value of a test; false where it is not known."""
        inner = [word for word in words[1:] if word not in ("]", "]]")]
        for operator, decide in (("||", any), ("-o", any), ("&&", all), ("-a", all)):
            if operator in inner:
                at = inner.index(operator)
                return decide((self._test(["[", *inner[:at]]), self._test(["[", *inner[at + 1 :]])))
        match inner:
            case ["!", *rest]:
                return not self._test(["[", *rest])
            case ["-z"]:
                return True
            case ["-z" | "-n" as flag, word]:
                return (not word) == (flag == "-z")
            case [left, "=" | "==" | "!=" as compare, right]:
                return fnmatchcase(left, right) == (compare != "!=")
            case ["=" | "==" | "!=" as compare, _] | [_, "=" | "==" | "!=" as compare]:  # one side is empty
                return compare == "!="
            case [left, "-eq" | "-ne" | "-lt" | "-le" | "-gt" | "-ge" as compare, right]:
                return self._variables.arithmetic(f"({left}) {_COMPARE[compare]} ({right})") == "1"
            case [word] if not word.startswith("-"):
                return True
        self.script.undecided.append(" ".join(words)[:80])
        return False


def _flat(words: list[str]) -> list[str]:
    """Words of a command, with those of a command line that is one of its words (``sh -c "..."``, ``eval``).

    An option and its value that stand in one word are taken apart too.
    """
    lines = (_split(word) if " --" in word or (word[:2] == "--" and " " in word) else [word] for word in words)
    return [part for line in lines for part in line]


def _split(text: str) -> list[str]:
    text = text.replace("\\\n", " ")
    try:
        return shlex.split(text, comments=False)
    except ValueError:
        return text.split()
