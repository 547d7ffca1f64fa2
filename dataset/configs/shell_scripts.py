"""The commands that a shell script would run, with their words: it is read, never executed.

What a command prints, files and the environment are not known.  A condition that needs them counts as false and is
listed.  A loop goes around as in the shell where its words and its condition are known; otherwise its body is read
once, and what it sets is not known.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from stepsight.dataset.base.bounded import read_text
from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.shell_statements import Array, Statement, parse
from stepsight.dataset.configs.shell_values import UNKNOWN, Variables

MOST_COMMANDS = 20_000
_MOST_CALLS = 20  # of functions that call each other
_MOST_ROUNDS, _MOST_STEPS = 200, 20_000  # of one loop; commands of a script beyond which loops go around no more
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=(.*)", re.DOTALL)
_DECLARE = ("export", "declare", "local", "readonly", "typeset")
_SILENT = (
    *("true", ":", "echo", "mkdir", "cd", "exit", "return", "rm", "cp", "trap", "ulimit", "break", "continue"),
    *("set", "shift", "printf", "unset"),
)
_FILLED = ("read", "mapfile", "readarray", "getopts")  # they set the variables that they name, or these:
_FILLED_ANYHOW = ("REPLY", "MAPFILE", "OPTARG", "OPTIND")
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
    unread: list[str] = field(default_factory=list)  # commands that may set variables, and are not followed
    batch_options: list[str] = field(default_factory=list)  # words of its #SBATCH lines
    places: list[tuple[int, int]] = field(default_factory=list)  # of each command in the text; (0, 0): elsewhere
    shown: Callable[[str], str] = str  # a text with what is not known in words


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
    reader.run(parse(UNKNOWN.sub("?", text), placed=True))
    script = reader.script
    script.variables, script.unset, script.shown = variables.values, list(variables.unset), variables.shown
    for line in _SBATCH.findall(text):
        script.batch_options += _split(line.partition(" #")[0])
    return script


class _Reader:
    """Reads the statements of a script, and follows those that would run."""

    def __init__(self, variables: Variables, folder: Path | None) -> None:
        self.script, self._variables, self._folder = ShellScript(), variables, folder
        self._functions: dict[str, list[Statement]] = {}
        self._locals = list[dict[str, str | list[str] | None]]()  # of each function that runs: values outside of it
        self._sourced: set[Path] = set()
        self._calls = self._steps = self._loops = 0
        self._leaving = ""  # ``break``, ``continue`` or ``return``
        self._last: bool | None = True  # the last command succeeded; None: not known
        self._said = self._program = ""  # the last command, and that of another program, which is taken to succeed
        self._unsure = ""  # the program on whose success the statement depends
        self._place = (0, 0)  # of the command in the text

    def run(self, statements: list[Statement]) -> None:
        """Follow statements in their order."""
        after, variables = "", self._variables
        for one in statements:
            if self._leaving:
                return
            decided = self._decided() if after in ("&&", "||") else None
            if after not in ("&&", "||") or decided is (after == "&&"):
                self._unsure = self._program if after in ("&&", "||") else ""
                before = dict(variables.values)
                if one.kind:
                    self._run_within(one)
                elif one.words or one.documents:
                    self._place = one.place
                    self._carry_out(one.words, one.documents)
                if after == "|" or one.kind == "(":  # a subshell has variables of its own
                    variables.values = before
            if one.words or one.kind or one.end != "\n":
                after = one.end

    def _decided(self) -> bool:
        """Whether the last command succeeded; what is not known counts as false, and is listed."""
        if self._last is None:
            self.script.undecided.append(self._said)
            self._last = False
        return self._last

    def _run_within(self, one: Statement) -> None:
        """Follow a statement that holds others."""
        match one.kind:
            case "function":
                self._functions[one.name] = one.parts[0]
            case "if":
                self._run_if(one)
            case "for" | "select":
                self._run_for(one)
            case "while" | "until":
                self._run_while(one)
            case "case":
                self._run_case(one)
            case _:
                return self.run(one.parts[0])
        self._last, self._program = True, ""

    def _run_if(self, one: Statement) -> None:
        for condition, body in zip(one.parts[:-1:2], one.parts[1::2], strict=False):
            self._program = ""
            self.run(condition)
            self._last = None if self._program else self._last
            if self._decided():
                return self.run(body)
        if len(one.parts) % 2:
            self.run(one.parts[-1])

    def _run_for(self, one: Statement) -> None:
        variables, words, before = self._variables, one.words, dict(self._variables.values)
        items = [item for word in words[3:] for item in variables.expanded(word)]
        strange = any(UNKNOWN.search(item) or set("{*?[") & set(item) for item in items)
        if strange or words[0] != "for" or words[2:3] != ["in"]:
            variables.forget("".join(words[1:2]), " ".join(words))
            self._round(one.parts[1])
            return self._forget_changes(before)
        for number, item in enumerate(items):
            variables.set(words[1], item)
            if self._round(one.parts[1]):
                return None
            if number >= _MOST_ROUNDS or self._steps > _MOST_STEPS:
                return self._forget_changes(before)
        return None

    def _run_while(self, one: Statement) -> None:
        before, rounds, known = dict(self._variables.values), 0, True
        while known and rounds < _MOST_ROUNDS and self._steps < _MOST_STEPS:
            self._program = ""
            self.run(one.parts[0])
            known, rounds = self._last is not None and not self._program, rounds + 1
            if (known and self._last is (one.kind == "until")) or self._round(one.parts[1]):
                return
        self._forget_changes(before)

    def _round(self, body: list[Statement]) -> bool:
        """Follow the body of a loop once; whether the loop ends with that."""
        self._loops += 1
        self.run(body)
        self._loops -= 1
        left, self._leaving = self._leaving, self._leaving if self._leaving == "return" else ""
        return left in ("break", "return")

    def _forget_changes(self, before: Mapping[str, str | list[str]]) -> None:
        """What a loop changes is not known where it is not known how often it goes around."""
        for name in [name for name, value in self._variables.values.items() if value != before.get(name)]:
            self._variables.forget(name, f"{name}, which a loop changes")

    def _run_case(self, one: Statement) -> None:
        """Follow the first branch that fits; of a word that is not known that is ``*``."""
        word = self._variables.joined(one.words[1]) if len(one.words) > 1 else ""
        if unknown := UNKNOWN.search(word) is not None:
            self.script.undecided.append(f"case {self._variables.shown(word)}")
        for patterns, body in zip(one.patterns, one.parts, strict=True):
            fitting = [self._variables.joined(pattern) for pattern in patterns]
            if any(pattern == "*" or (not unknown and fnmatchcase(word, pattern)) for pattern in fitting):
                return self.run(body)

    def _carry_out(self, words: list[str], documents: list[tuple[str, str]]) -> None:
        """Follow a command; ``_last`` tells whether it succeeds."""
        variables, script = self._variables, self.script
        self._steps += 1
        script.documents += [text if quote else variables.joined(text, quotes=False) for quote, text in documents]
        negated = words[:1] == ["!"]
        words = words[1:] if negated else words
        self._said, self._program = variables.shown(" ".join(words))[:80], ""
        count = next((at for at, raw in enumerate(words) if not _ASSIGNMENT.fullmatch(raw)), len(words))
        if words and words[0] in _DECLARE:
            self._declare(words)
            self._last = True
            return
        rest = [word for raw in words[count:] for word in variables.expanded(raw)]
        # Of assignments before a command that command alone knows, and functions that it calls.
        names = [word.split("=")[0].split("[")[0].rstrip("+") for word in words[:count]] if rest else []
        saved = {name: variables.values.get(name) for name in names}
        for raw in words[:count]:
            self._assign(raw)
        self._last = self._command(rest) if rest else True
        self._restore(saved)
        self._last = not self._last if negated and self._last is not None and not self._program else self._last

    def _restore(self, saved: Mapping[str, str | list[str] | None]) -> None:
        for name, value in saved.items():
            if value is None:
                self._variables.values.pop(name, None)
            else:
                self._variables.values[name] = value

    def _command(self, words: list[str]) -> bool | None:
        """Follow a command without its assignments; whether it succeeds, None: not known."""
        variables, name, text = self._variables, words[0], " ".join(words)
        if name.startswith("((") or name == "let":
            inner = text[2:-2] if name != "let" else ",".join(words[1:])
            value = variables.arithmetic(inner)
            return None if UNKNOWN.search(value) else value not in ("", "0")
        if name in ("[", "[[", "test"):
            return self._test(words)
        if name in _FILLED or (name == "printf" and words[1][:2] == "-v"):
            for word in (*words[1:], *_FILLED_ANYHOW, *([words[1][2:]] if name == "printf" else [])):
                if word.isidentifier():
                    variables.forget(word, text)
            return None
        match name:
            case "unset":
                for word in words[1:]:
                    if "[" in word:
                        variables.forget(word.partition("[")[0], text)
                    variables.values.pop(word, None)
            case "set" if "--" in words:
                self._set_arguments(words[words.index("--") + 1 :])
            case "shift":
                held, count = variables.values.get("@"), words[1] if len(words) > 1 else "1"
                self._set_arguments(held[int(count) :] if isinstance(held, list) and count.isdecimal() else [])
            case "." | "source" if len(words) > 1:
                self._source(words[1])
            case "eval":
                return self._eval(text)
            case "break" | "continue" if self._loops:
                self._leaving = name
            case "return" if self._locals:
                self._leaving = name
            case _ if name in self._functions:
                self._call(self._functions[name], words[1:])
                return self._last
            case _ if name not in (*_SILENT, "false") and len(self.script.commands) < MOST_COMMANDS:
                self.script.commands.append(_flat(words))
                self.script.places.append(self._place)
                self._program = self._said
        return name != "false"

    def _eval(self, text: str) -> bool | None:
        try:
            self._nest(parse(text.removeprefix("eval")))
        except JobError:
            self.script.unread.append(f"{self._variables.shown(text)}: not followed")
        return self._last

    def _source(self, named: str) -> None:
        path = None if self._folder is None else self._folder / Path(named).name
        if path is None or not path.is_file() or UNKNOWN.search(path.name):
            self.script.unread.append(f"source {self._variables.shown(named)}: what it sets is not known")
        elif path not in self._sourced:
            self._sourced.add(path)
            self._nest(parse(read_text(path, "utf-8-sig")))

    def _call(self, statements: list[Statement], arguments: list[str]) -> None:
        """Follow a function, which has arguments and variables of its own."""
        held = {name: value for name, value in self._variables.values.items() if not name.isidentifier()}
        self._locals.append({})
        self._set_arguments(arguments)
        self._nest(statements)
        self._set_arguments([])
        self._restore({**held, **self._locals.pop()})
        self._leaving = "" if self._leaving == "return" else self._leaving

    def _nest(self, statements: list[Statement]) -> None:
        """Follow statements that a command names."""
        if self._calls < _MOST_CALLS and len(self.script.commands) < MOST_COMMANDS:
            self._calls += 1
            self.run(statements)
            self._calls -= 1

    def _set_arguments(self, words: list[str]) -> None:
        values = self._variables.values
        for name in [name for name in values if not name.isidentifier()]:
            del values[name]
        if words:
            values.update({str(number): word for number, word in enumerate(words, 1)})
            values.update({"@": list(words), "*": list(words), "#": str(len(words))})

    def _assign(self, raw: str) -> None:
        found = _ASSIGNMENT.fullmatch(raw)
        assert found is not None, raw
        (name, index, plus, value), variables = found.groups(), self._variables
        if self._unsure:
            variables.forget(name, f"{self._unsure} decides")
        elif isinstance(raw, Array):
            items = [word for item in raw.items for word in variables.expanded(item)]
            if any(re.match(r"\[[^\]]*\]\+?=", item) for item in raw.items):
                variables.forget(name, f"{raw}({' '.join(raw.items)})")
            else:
                variables.set(name, items, add=bool(plus))
        elif index:
            variables.set_item(name, index[1:-1], variables.joined(value), add=bool(plus))
        else:
            variables.set(name, variables.joined(value), add=bool(plus))

    def _declare(self, words: list[str]) -> None:
        """``declare`` and its like: what an option changes of a variable, and its value."""
        variables, options = self._variables, "".join(word[1:] for word in words[1:] if word.startswith("-"))
        for raw in words[1:]:
            found = _ASSIGNMENT.fullmatch(raw)
            name, text = found[1] if found else raw, " ".join(words)
            if raw.startswith(("-", "+")):
                continue
            if self._locals and words[0] in ("local", "declare", "typeset") and "g" not in options:
                self._locals[-1].setdefault(name, variables.values.get(name))
            if words[0] in ("local", "declare", "typeset") and set(options) & {
                "n",
                "A",
            }:  # another's name; a dictionary
                for each in (name, found[4] if found else ""):
                    if each.isidentifier():
                        variables.forget(each, text, for_good=True)
            variables.integers |= {name} if "i" in options else set()
            if found:
                self._assign(raw)

    def _test(self, words: list[str]) -> bool | None:
        """The value of a test; None where it is not known."""
        inner = [word for word in words[1:] if word not in ("]", "]]")]
        for operator, sure in (("||", True), ("-o", True), ("&&", False), ("-a", False)):
            if operator in inner:
                at = inner.index(operator)
                sides = [self._test(["[", *side]) for side in (inner[:at], inner[at + 1 :])]
                return sure if sure in sides else None if None in sides else not sure
        if any(map(UNKNOWN.search, inner)):
            return None
        match inner:
            case ["!", *rest]:
                value = self._test(["[", *rest])
                return None if value is None else not value
            case ["-z"]:
                return True
            case ["-z" | "-n" as flag, word]:
                return (not word) == (flag == "-z")
            case [left, "=" | "==" | "!=" as compare, right]:
                return fnmatchcase(left, right) == (compare != "!=")
            case ["=" | "==" | "!=" as compare, _] | [_, "=" | "==" | "!=" as compare]:  # one side is empty
                return compare == "!="
            case [left, "-eq" | "-ne" | "-lt" | "-le" | "-gt" | "-ge" as compare, right]:
                number = self._variables.arithmetic(f"({left}) {_COMPARE[compare]} ({right})")
                return None if UNKNOWN.search(number) else number == "1"
            case [word] if not word.startswith("-"):
                return True
        return None


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
