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

from stepsight.dataset.base.bounded import read_text
from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.shell_values import Variables, part_end

MOST_TOKENS, MOST_COMMANDS = 200_000, 20_000
MOST_DEPTH, _MOST_CALLS = 40, 20  # of statements within statements; of functions that call each other
_BLANK = re.compile(r"(?:[ \t\r]|\\\n|#[^\n]*)+")
_REDIRECTION = re.compile(r"\d*(?:<<<|>>|>&|<&|&>|<(?!<)|>)[ \t]*")
_HEREDOC = re.compile(r"\d*<<-?[ \t]*(['\"]?)([A-Za-z_][\w.-]*)\1")
_FUNCTION = re.compile(r"(?:function[ \t]+([\w-]+)[ \t]*(?:\([ \t]*\))?|([\w-]+)[ \t]*\([ \t]*\))\s*\{")
_ARITHMETIC = re.compile(r"\(\(.*?\)\)(?!\))", re.DOTALL)
_END = re.compile(r"&&|\|\||;;|[|&;()\n]")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=(.*)", re.DOTALL)
_DECLARE = ("export", "declare", "local", "readonly", "typeset")
_SILENT = (
    *("true", "false", ":", "echo", "printf", "mkdir", "cd", "set", "exit", "return", "rm", "cp", "shift", "unset"),
    *("trap", "ulimit"),
)
_COMPARE = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}
_CLOSED_BY = {"if": "fi", "loop": "done", "case": "esac", "{": "}", "function": "}", "(": ")"}
_WITHIN = {"then": "if", "elif": "if", "else": "if", "do": "loop", "fi": "if", "done": "loop", "esac": "case", "}": "{"}
_KEYWORDS = {*_WITHIN, "if", "{", "for", "select", "while", "until", "case"} - {"(", ")"}
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
    reader = _Reader(variables, folder)
    reader.run(_statements(text))
    script = reader.script
    script.variables, script.unset = variables.values, list(variables.unset)
    for line in _SBATCH.findall(text):
        script.batch_options += _split(line.partition(" #")[0])
    return script


class _Array(str):
    """A word ``NAME=`` or ``NAME+=`` with the words in the brackets after it."""

    items: list[str]


@dataclass
class _Statement:
    """Words as written, up to an operator (``end``); or the beginning of a ``function``."""

    words: list[str] = field(default_factory=list)
    documents: list[tuple[str, str]] = field(default_factory=list)  # a quote, if nothing is substituted, and the text
    end: str = ""
    function: str = ""


def _statements(text: str) -> list[_Statement]:
    """Split a script into statements.

    Raises:
        JobError: If a quote or a bracket is left open, or the script is too long.
    """
    found, waiting = [_Statement()], list[tuple[_Statement, str, str]]()  # here-documents whose text follows the line
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
            at, now.function = part.end(), part[1] or part[2]
            found.append(_Statement())
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
            found.append(_Statement())
        elif (end_of_word := _word_end(text, at)) > at:
            now.words.append(text[at:end_of_word])
            at = end_of_word
        else:
            raise JobError(f"a here-document of a script needs a delimiter, got {text[at + 2 : at + 42]!r}")
    return found


def _word_end(text: str, at: int) -> int:
    while at < len(text) and text[at] not in " \t\r\n;&|<>()":
        at = part_end(text, at)
    if at > len(text):
        raise JobError("a quote or a bracket of the script is never closed")
    return at


def _array(name: str, text: str, at: int) -> tuple[_Array, int]:
    """A word with the items of the array after it, and the place after its bracket."""
    word = _Array(name)
    word.items = []
    while at < len(text) and text[at] != ")":
        blank, end = _BLANK.match(text, at), _word_end(text, at) if text[at] != "#" else at
        if blank is None and end > at:
            word.items.append(text[at:end])
        at = blank.end() if blank else max(end, at + 1)
    if at >= len(text):
        raise JobError("a script's statement must be closed by ), got the end of the file")
    return word, at + 1


@dataclass
class _Frame:
    """A statement that holds others, such as ``if``."""

    kind: str
    outer: bool  # whether the statements around it run, with a loop also whether its body does
    runs: bool  # whether the statements at this place run
    taken: bool = False  # a branch of it ran
    patterns: list[str] | None = None  # of the next branch of a ``case``, while they are read
    name: str = ""  # of a function; the word of a ``case``
    start: int = 0  # of a function's statements


class _Reader:
    """Reads the statements of a script, and follows those that would run."""

    def __init__(self, variables: Variables, folder: Path | None) -> None:
        self.script, self._variables, self._folder = ShellScript(), variables, folder
        self._functions: dict[str, list[_Statement]] = {}
        self._sourced: set[Path] = set()
        self._calls, self._last = 0, True  # the last command succeeded

    def run(self, statements: list[_Statement]) -> None:
        """Follow all statements; each may begin or end statements that hold others."""
        frames, after = [_Frame("", True, True)], ""
        for place, statement in enumerate(statements):
            words, runs = statement.words, frames[-1].runs and after != ("||" if self._last else "&&")
            if statement.function:
                frames.append(_Frame("function", runs, False, name=statement.function, start=place + 1))
            while words and words[0] in _KEYWORDS and (frames[-1].patterns is None or words[0] == "esac"):
                if words[0] == "}" and frames[-1].kind == "function" and frames[-1].outer:
                    self._functions[frames[-1].name] = statements[frames[-1].start : place]
                words = self._follow(words, frames, runs)
                runs = frames[-1].runs
            if len(frames) > MOST_DEPTH:
                raise JobError(f"statements of a script must be nested at most {MOST_DEPTH} deep")
            if frames[-1].patterns is not None:
                self._choose(frames[-1], words, statement.end)
                continue
            if runs and (words or statement.documents):
                self._last = self._carry_out(words, statement.documents)
            if statement.end == "(":
                frames.append(_Frame("(", runs, runs))
            elif statement.end == ")" and frames[-1].kind == "(":
                frames.pop()
            elif statement.end == ";;" and frames[-1].kind == "case":
                frames[-1].runs, frames[-1].patterns = False, []
            if statement.words or statement.end != "\n":
                after = statement.end
        if len(frames) > 1:
            end = _CLOSED_BY[frames[-1].kind]
            raise JobError(f"a script's statement must be closed by {end}, got the end of the file")

    def _follow(self, words: list[str], frames: list[_Frame], runs: bool) -> list[str]:
        """Begin, go on with or end a statement that holds others; return the words after its own."""
        frame, variables = frames[-1], self._variables
        if _WITHIN.get(words[0], frame.kind) != frame.kind and (words[0], frame.kind) != ("}", "function"):
            raise JobError(f"a script's {words[0]} must end a statement that it belongs to, got one in {frame.kind!r}")
        match words[0]:
            case "if":
                frames.append(_Frame("if", runs, runs))
                self._last = True
            case "then":
                frame.runs = frame.runs and self._last
                frame.taken = frame.taken or frame.runs
            case "elif" | "else":
                frame.runs = frame.outer and not frame.taken
                self._last = True
            case "for" | "select" if runs and words[2:3] == ["in"]:
                items = [item for word in words[3:] for item in variables.expanded(word)]
                if items:
                    variables.set(words[1], items[0])
                frames.append(_Frame("loop", bool(items), False))
            case "for" | "select" | "while" | "until":
                frames.append(_Frame("loop", runs, False))
            case "do":
                frame.runs = frame.outer
            case "case":
                word = variables.joined(words[1]) if runs and len(words) > 1 else ""
                frames.append(_Frame("case", runs, False, name=word, patterns=[]))
                return words[3:]
            case "{":
                frames.append(_Frame("{", runs, runs))
            case _:
                frames.pop()
                self._last = self._last if words[0] == "}" else True
        return [] if words[0] in ("for", "select", "while", "until") else words[1:]

    def _choose(self, frame: _Frame, words: list[str], end: str) -> None:
        """Read patterns of a branch of a ``case``; behind the last one it is known whether the branch runs."""
        frame.patterns = [*(frame.patterns or ()), *words]
        if end == ")":
            fits = any(fnmatchcase(frame.name, self._variables.joined(pattern)) for pattern in frame.patterns)
            frame.runs, frame.patterns = frame.outer and not frame.taken and fits, None
            frame.taken = frame.taken or frame.runs

    def _carry_out(self, words: list[str], documents: list[tuple[str, str]]) -> bool:
        variables, script = self._variables, self.script
        script.documents += [text if quote else variables.joined(text, quotes=False) for quote, text in documents]
        words = [word for raw in self._assign(words) for word in variables.expanded(raw)]
        name = words[0] if words else "true"
        if name.startswith("(("):
            return variables.arithmetic(name[2:-2]) not in ("", "0")
        if name in ("[", "[[", "test"):
            return self._test(words)
        if name in (".", "source") and len(words) > 1:
            path = None if self._folder is None else self._folder / Path(words[1]).name
            if path is not None and path not in self._sourced and path.is_file():  # others stay unknown
                self._sourced.add(path)
                self.run(_statements(read_text(path, "utf-8-sig")))
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

    def _assign(self, words: list[str]) -> list[str]:
        """Run the assignments at the beginning of a command; return the words after them."""
        for index, raw in enumerate(words):
            if found := _ASSIGNMENT.fullmatch(raw):
                name, _, plus, value = found.groups()
                items = [word for item in getattr(raw, "items", ()) for word in self._variables.expanded(item)]
                array = isinstance(raw, _Array)
                self._variables.set(name, items if array else self._variables.joined(value), add=bool(plus))
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
