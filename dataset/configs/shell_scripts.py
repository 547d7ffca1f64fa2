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
from stepsight.dataset.configs.shell_syntax import Branches, Cases, Command, Function, Loop, Statement, shell_statements
from stepsight.dataset.configs.shell_tokens import shell_tokens
from stepsight.dataset.configs.shell_values import Variables, arithmetic

MOST_COMMANDS = 20_000
_MOST_DEPTH = 20  # of functions and scripts that call each other
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=(.*)", re.DOTALL)
_DECLARE = ("export", "declare", "local", "readonly", "typeset")
_SILENT = ("echo", "printf", "mkdir", "cd", "set", "exit", "return", "rm", "cp", "shift", "unset", "trap", "ulimit")
_COMPARE = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}
_SBATCH = re.compile(r"^\s*#SBATCH\s+(.*?)\s*$", re.MULTILINE)


@dataclass
class ShellScript:
    """The commands of a script.

    Attributes:
        commands: Words of every command, in their order.
        documents: Texts of here-documents.
        variables: At its end.
        unset: Variables that it uses and does not set.
        undecided: Conditions that need files or programs; they count as false.
        batch_options: Words of its ``#SBATCH`` lines.
    """

    commands: list[list[str]] = field(default_factory=list)
    documents: list[str] = field(default_factory=list)
    variables: dict[str, str | list[str]] = field(default_factory=dict)
    unset: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    batch_options: list[str] = field(default_factory=list)


def read_script(text: str, defined: dict[str, str] | None = None, folder: Path | None = None) -> ShellScript:
    """Follow a script's variables, conditions and functions to the commands that it would run.

    Args:
        text: Of the script.
        defined: Variables that the user sets; they win over the script's own.
        folder: Of the script: files in it that the script sources are read too.

    Raises:
        JobError: If the script cannot be parsed, or is too large.
    """
    run = _Reading(Variables(dict(defined or {})), folder)
    run.block(shell_statements(shell_tokens(text)))
    script, variables = run.script, run.variables
    script.variables, script.unset = variables.values, list(variables.unset)
    for line in _SBATCH.findall(text):
        script.batch_options += _split(line.partition(" #")[0])
    return script


class _Reading:
    def __init__(self, variables: Variables, folder: Path | None) -> None:
        self.script, self.variables = ShellScript(), variables
        self._folder = folder
        self._functions: dict[str, tuple[Statement, ...]] = {}
        self._depth, self._last = 0, True
        self._sourced: set[Path] = set()

    def block(self, statements: tuple[Statement, ...]) -> bool:
        """Read statements; return whether the last command succeeds, as far as that is known."""
        self._last = True
        for statement in statements:
            match statement:
                case Command():
                    if statement.after != ("&&" if not self._last else "||") or not statement.after:
                        self._last = self._command(statement)
                case Branches():
                    self._branches(statement)
                case Cases():
                    self._cases(statement)
                case Loop():
                    self._loop(statement)
                case Function():
                    self._define(statement)
        return self._last

    def _define(self, function: Function) -> None:
        if function.name:
            self._functions[function.name] = function.body
        else:
            self.block(function.body)

    def _branches(self, statement: Branches) -> None:
        for condition, body in statement.cases:
            if not condition or self.block(condition):
                self.block(body)
                break
        self._last = True

    def _cases(self, statement: Cases) -> None:
        word = self.variables.joined(statement.word)
        for patterns, body in statement.cases:
            if any(fnmatchcase(word, self.variables.joined(pattern)) for pattern in patterns):
                self.block(body)
                break
        self._last = True

    def _loop(self, statement: Loop) -> None:
        words = [word for raw in statement.words for word in self.variables.expanded(raw)]
        if statement.name and words:
            self.variables.set(statement.name, words[0])
        if not statement.name or words:
            self.block(statement.body)
        self._last = True

    def _command(self, command: Command) -> bool:
        self.script.documents += [
            text if quoted else self.variables.substituted(text) for text, quoted in command.documents
        ]
        rest = self._assign(command)
        words = [word for raw in rest for word in self.variables.expanded(raw)]
        if not words:
            return True
        name = words[0]
        if name in ("[", "[[", "test", "((") or name.startswith("(("):
            return self._test(words)
        if name in ("true", "false", ":"):
            return name != "false"
        if name in (".", "source") and len(words) > 1:
            self._source(words[1])
        elif name in self._functions:
            self._call(self._functions[name], words[1:])
        elif name not in _SILENT and len(self.script.commands) < MOST_COMMANDS:
            self.script.commands.append(_flat(words))
        return True

    def _assign(self, command: Command) -> list[str]:
        """Run the assignments at the beginning of a command; return the words after them."""
        declares = bool(command.words) and command.words[0] in _DECLARE
        for index, raw in enumerate(command.words):
            if index == 0 and declares:
                continue
            found = _ASSIGNMENT.fullmatch(raw)
            if found is None:
                if declares:
                    continue  # an option, or a name alone
                return list(command.words[index:])
            name, _, plus, value = found.groups()
            if index in command.arrays:
                items = [word for item in command.arrays[index] for word in self.variables.expanded(item)]
                self.variables.set(name, items, add=bool(plus))
            else:
                self.variables.set(name, self.variables.joined(value), add=bool(plus))
        return []

    def _call(self, body: tuple[Statement, ...], arguments: list[str]) -> None:
        if self._depth >= _MOST_DEPTH or len(self.script.commands) >= MOST_COMMANDS:
            return
        self._depth += 1
        for number, argument in enumerate(arguments, 1):
            self.variables.set(str(number), argument)
        self.variables.set("@", arguments)
        self.block(body)
        self._depth -= 1

    def _source(self, name: str) -> None:
        """Read a sourced script if it is in the same folder; others stay unknown."""
        if self._folder is None:
            return
        path = self._folder / Path(name).name
        if path in self._sourced or not path.is_file():
            return
        self._sourced.add(path)
        self.block(shell_statements(shell_tokens(read_text(path, "utf-8-sig"))))

    def _test(self, words: list[str]) -> bool:
        """The value of a test; false where it is not known."""
        text = " ".join(words)
        if words[0].startswith("(("):
            value = arithmetic(text.strip("() "), self.variables)
            return value not in ("", "0")
        inner = [word for word in words[1:] if word not in ("]", "]]")]
        for operator, decide in (("||", any), ("-o", any), ("&&", all), ("-a", all)):
            if operator in inner:
                at = inner.index(operator)
                return decide((self._test(["[", *inner[:at]]), self._test(["[", *inner[at + 1 :]])))
        if inner[:1] == ["!"]:
            return not self._test(["[", *inner[1:]])
        match inner:
            case ["-z"]:
                return True
            case ["-z" | "-n" as flag, word]:
                return (not word) == (flag == "-z")
            case [left, "=" | "==", right]:
                return fnmatchcase(left, right)
            case [left, "!=", right]:
                return not fnmatchcase(left, right)
            case ["=" | "==", _] | [_, "=" | "=="]:  # one side is empty
                return False
            case ["!=", _] | [_, "!="]:
                return True
            case [left, "-eq" | "-ne" | "-lt" | "-le" | "-gt" | "-ge" as compare, right]:
                return arithmetic(f"({left}) {_COMPARE[compare]} ({right})", self.variables) == "1"
            case [word] if not word.startswith("-"):
                return True
        self.script.undecided.append(text[:80])
        return False


def _flat(words: list[str]) -> list[str]:
    """Words of a command, with those of a command line that is one of its words (``sh -c "..."``, ``eval``).

    An option and its value that stand in one word are taken apart too.
    """
    return [
        part
        for word in words
        for part in (_split(word) if " --" in word or (word[:2] == "--" and " " in word) else [word])
    ]


def _split(text: str) -> list[str]:
    text = text.replace("\\\n", " ")
    try:
        return shlex.split(text, comments=False)
    except ValueError:
        return text.split()
