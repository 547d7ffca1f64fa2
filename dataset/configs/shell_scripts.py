"""The commands that a shell script would run, with their words: it is read, never executed.

What a command prints, files and the environment are not known.  A condition that needs them counts as false and is
listed.  A loop goes around as in the shell where its words and its condition are known; otherwise its body is read
once, and what it sets is not known.  An ``exit`` ends a script that has run a command with options; one before, or with
a status of failure, belongs to a check that the run passes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from stepsight.dataset.base.bounded import read_text
from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.documents import nearest
from stepsight.dataset.configs.shell_words import UNKNOWN, WITHIN, Array, Scanner, Variables

MOST_COMMANDS = 20_000
MOST_WORDS = 400_000  # of a script; a word counts as often as it is read
_MOST_DEPTH = 80  # of statements within statements, and of functions that call each other
_MOST_ROUNDS, _MOST_LOOPED = 200, 200_000  # of one loop; words of a script beyond which loops go around no more
_HOLDING = ("if", "for", "select", "while", "until", "case", "{", "function")  # first words of what holds others
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=(.*)", re.DOTALL)
_DECLARE = ("export", "declare", "local", "readonly", "typeset")
_SILENT = (
    *("true", ":", "echo", "mkdir", "cd", "exit", "return", "rm", "cp", "trap", "ulimit", "break", "continue"),
    *("set", "shift", "printf", "unset"),
)
_FILLED = ("read", "mapfile", "readarray", "getopts")  # they set the variables that they name, or these:
_FILLED_ANYHOW = ("REPLY", "MAPFILE", "OPTARG", "OPTIND")
_COMPARE = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}
_SEVERAL = re.compile("^--.* | --", re.DOTALL)  # in a word that holds several
_SBATCH = re.compile(r"^\s*#SBATCH\s+(.*?)\s*$", re.MULTILINE)


def read_script(text: str, defined: dict[str, str] | None = None, folder: Path | None = None) -> ShellScript:
    """Follow a script's variables, conditions and functions to the commands that it would run.

    Args:
        text: Of the script.
        defined: Variables that the user sets; they win over the script's own.
        folder: Of the script: files in it that the script sources are read too.

    Raises:
        JobError: If the script cannot be parsed, or is too large.
    """
    script = ShellScript(Variables(dict(defined or {})), folder)
    script.follow(UNKNOWN.sub("?", text), 0)
    for line in _SBATCH.findall(text):
        script.batch_options += _split(line.partition(" #")[0])
    return script


class ShellScript:
    """What a script would run: statements are passed, those of a loop several times, and followed if they would run."""

    def __init__(self, variables: Variables, folder: Path | None) -> None:
        self.variables, self._folder = variables, folder
        self.commands, self.places = list[list[str]](), list[tuple[int, int]]()  # in the text; (0, 0): elsewhere
        self.documents = list[str]()  # texts of here-documents
        self.undecided = list[str]()  # conditions that need files or programs; they count as false
        self.unread = list[str]()  # commands that may set variables, and are not followed
        self.batch_options = list[str]()  # words of the #SBATCH lines
        self._scan = Scanner("", 0)  # of what is followed
        self._functions: dict[str, tuple[str, int]] = {}  # their texts, and where those begin
        self._locals = list[dict[str, str | list[str] | None]]()  # of each function that runs: values outside of it
        self._sourced: set[Path] = set()
        self._depth = self._words = self._loops = 0
        self._leaving = ""  # ``break``, ``continue``, ``return`` or ``exit``
        self._last: bool | None = True  # the last command succeeded; None: not known
        self._said = self._program = ""  # the last command, and that of another program, which is taken to succeed
        self._unsure = ""  # the program on whose success the statement depends

    def follow(self, text: str, offset: int = -1) -> None:
        """Follow the statements of a text that begins somewhere in the script; -1: elsewhere.

        Functions that call themselves end somewhere.
        """
        if self._depth < _MOST_DEPTH // 2 and len(self.commands) < MOST_COMMANDS:
            before, self._scan = (self._scan, self._depth), Scanner(text, offset)
            try:
                self._block((), True)
            finally:
                self._scan, self._depth = before

    def _block(self, ends: tuple[str, ...], live: bool) -> str:
        """Pass statements up to a word or an operator that ends them, and follow them if they are ``live``."""
        first, after, variables = "", "", self.variables
        if self._depth > _MOST_DEPTH:
            raise JobError(f"statements of a script must be nested at most {_MOST_DEPTH} deep")
        self._depth += 1
        while self._scan.more:
            words, documents, end = self._scan.statement()
            self._words += len(words) + 1
            if self._words > MOST_WORDS:
                raise JobError(f"a script must have at most {MOST_WORDS} words, got {self._words}")
            first = "".join(words[:1])
            if first in ends:
                break
            if first in WITHIN:
                raise JobError(f"a script's {first} must end a statement that it belongs to")
            depends = after in ("&&", "||")
            runs = live and not self._leaving and (not depends or self._decided() is (after == "&&"))
            self._unsure = self._program if depends else ""
            before = dict(variables.values) if runs else {}
            holds = end == "(" or first in _HOLDING
            if holds:
                self._compound(words, end, runs)
            elif runs and (words or documents):
                self._carry_out(words, documents)
            if runs and (after == "|" or end == "("):  # a subshell has variables of its own
                variables.values = before
            first = "" if holds else end
            if first in ends:
                break
            after = first if words or first != "\n" else after
        else:
            if ends:
                raise JobError(f"a script's statement must be closed by {ends[-1]}, got the end of the file")
        self._depth -= 1
        return first

    def _decided(self) -> bool:
        """Whether the last command succeeded; what is not known counts as false, and is listed."""
        if self._last is None:
            self.undecided.append(self._said)
            self._last = False
        return self._last

    def _compound(self, words: list[str], end: str, live: bool) -> None:
        """Pass a statement that holds others."""
        start, first = self._scan.at, words[0] if end != "(" else end
        match first:
            case "(" | "{":
                self._block((")" if first == "(" else "}",), live)
                self._leaving = "" if (first, self._leaving) == ("(", "exit") else self._leaving
                return
            case "function":
                self._block(("}",), False)
                if live:
                    self._functions[words[1]] = self._scan.text[start : self._scan.at - 1], self._scan.offset + start
            case "if":
                self._if(live)
            case "case":
                self._case(words, end, live)
            case _:
                self._loop(words, live)
        if live:
            self._last, self._program = True, ""

    def _if(self, live: bool) -> None:
        word = "if"
        while word != "fi":
            chosen = live
            if word != "else":
                self._program = ""
                self._block(("then",), live)
                self._last = None if self._program else self._last
                chosen = live and self._decided()
            word = self._block(("elif", "else", "fi"), chosen)
            live = live and not chosen

    def _loop(self, words: list[str], live: bool) -> None:
        """Go around a loop; where it is not known how often, follow its body once, and forget what that changes."""
        variables, start, before, rounds = self.variables, self._scan.at, dict(self.variables.values), 0
        items = [item for word in words[3:] for item in variables.expanded(word)] if live else []
        strange = any(UNKNOWN.search(item) or set("{*?[") & set(item) for item in items)
        counts = words[0] in ("while", "until")
        known = counts or (words[0] == "for" and words[2:3] == ["in"] and not strange)
        if live and not known:
            variables.forget("".join(words[1:2]), " ".join(words))
        while True:
            self._scan.at, self._program = start, ""
            self._block(("do",), live)
            if counts:
                known = self._last is not None and not self._program
                goes = live and not (known and self._last is (words[0] == "until"))
            else:
                goes = live and (not known or rounds < len(items))
            if goes and known and not counts:
                variables.set(words[1], items[rounds])
            self._loops += 1
            self._block(("done",), goes)
            self._loops -= 1
            left, rounds = self._leaving, rounds + 1
            self._leaving = "" if left in ("break", "continue") else left
            if not goes or (known and left not in ("", "continue")):
                return
            if not known or rounds >= _MOST_ROUNDS or self._words > _MOST_LOOPED:
                break
        for name in [name for name, value in variables.values.items() if value != before.get(name)]:
            variables.forget(name, f"{name}, which a loop changes")

    def _case(self, words: list[str], end: str, live: bool) -> None:
        """Follow the first branch that fits; of a word that is not known that is ``*``."""
        word = self.variables.joined(words[1]) if live and len(words) > 1 else ""
        if unknown := UNKNOWN.search(word) is not None:
            self.undecided.append(f"case {self.variables.shown(word)}")
        patterns = words[3:]
        while True:
            while end != ")":
                words, _, end = self._scan.statement()
                if words[:1] == ["esac"]:
                    return
                if not self._scan.more:
                    raise JobError("a script's statement must be closed by esac, got the end of the file")
                patterns += words
            fitting = map(self.variables.joined, patterns) if live else ()
            fits = any(pattern == "*" or (not unknown and fnmatchcase(word, pattern)) for pattern in fitting)
            if self._block((";;", "esac"), fits) == "esac":
                return
            live, patterns, end = live and not fits, [], ""

    def _carry_out(self, words: list[str], documents: list[tuple[str, str]]) -> None:
        """Follow a command; ``_last`` tells whether it succeeds."""
        variables = self.variables
        self.documents += [text if quote else variables.joined(text, quotes=False) for quote, text in documents]
        negated = words[:1] == ["!"]
        words = words[1:] if negated else words
        self._said, self._program = variables.shown(" ".join(words))[:80], ""
        if words and words[0] in _DECLARE:
            self._declare(words)
            self._last = True
            return
        count = next((at for at, raw in enumerate(words) if not _ASSIGNMENT.fullmatch(raw)), len(words))
        rest = [word for raw in words[count:] for word in variables.expanded(raw)]
        names = [re.split(r"[\[+=]", word)[0] for word in words[:count]]
        saved = {name: variables.values.get(name) for name in names}
        for raw in words[:count]:
            self._assign(raw)
        self._last = True
        if rest:  # assignments before a command are known to it alone, and to functions that it calls
            self._last = self._command(rest)
            self._restore(saved)
        self._last = not self._last if negated and self._last is not None and not self._program else self._last

    def _restore(self, saved: Mapping[str, str | list[str] | None]) -> None:
        for name in saved:
            self.variables.values.pop(name, None)
        self.variables.values.update({name: value for name, value in saved.items() if value is not None})

    def _command(self, words: list[str]) -> bool | None:
        """Follow a command without its assignments; whether it succeeds, None: not known."""
        variables, name, text = self.variables, words[0], " ".join(words)
        if name.startswith("((") or name == "let":
            value = variables.arithmetic(text[2:-2] if name != "let" else ",".join(words[1:]))
            return None if UNKNOWN.search(value) else value not in ("", "0")
        if name in ("[", "[[", "test"):
            return self._test([word for word in words[1:] if word not in ("]", "]]")])
        if name in _FILLED or text.startswith("printf -v"):
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
                try:
                    self.follow(text.removeprefix("eval"))
                except JobError:
                    self.unread.append(f"{variables.shown(text)}: not followed")
                return self._last
            case "exit" if words[1:2] in ([], ["0"]) and any("--" in word for each in self.commands for word in each):
                self._leaving = name
            case "break" | "continue" | "return" if self._locals if name == "return" else self._loops:
                self._leaving = name
            case _ if name in self._functions:
                self._call(*self._functions[name], words[1:])
                return self._last
            case _ if name not in (*_SILENT, "false") and len(self.commands) < MOST_COMMANDS:
                # An option with its value, or a command line (sh -c "..."), may be one word.
                lines = (
                    _split(each) if " --" in each or (each[:2] == "--" and " " in each) else [each] for each in words
                )
                self.commands.append([part for line in lines for part in line])
                self.places.append(self._scan.place)
                self._program = self._said
        return name != "false"

    def _source(self, named: str) -> None:
        name = Path(named).name
        path = None if self._folder is None or UNKNOWN.search(name) else nearest(self._folder, (name,))
        if path is None:
            self.unread.append(f"source {self.variables.shown(named)}: what it sets is not known")
        elif path not in self._sourced:
            self._sourced.add(path)
            self.follow(read_text(path, "utf-8-sig"))

    def _call(self, text: str, offset: int, arguments: list[str]) -> None:
        """Follow a function, which has arguments and variables of its own."""
        held = {name: value for name, value in self.variables.values.items() if not name.isidentifier()}
        self._locals.append({})
        self._set_arguments(arguments)
        self.follow(text, offset)
        self._set_arguments([])
        self._restore({**held, **self._locals.pop()})
        self._leaving = "" if self._leaving == "return" else self._leaving

    def _set_arguments(self, words: list[str]) -> None:
        values = self.variables.values
        for name in [name for name in values if not name.isidentifier()]:
            del values[name]
        values.update({str(number): word for number, word in enumerate(words, 1)})
        known = not any(map(UNKNOWN.search, words))  # what a command prints may be several words, or none
        count = str(len(words)) if known else self.variables.unknown("$#")
        values.update({"@": list(words), "*": list(words), "#": count} if words else {})

    def _assign(self, raw: str) -> None:
        found, variables = _ASSIGNMENT.fullmatch(raw), self.variables
        assert found is not None, raw
        name, index, plus, value = found.groups()
        if self._unsure:
            variables.forget(name, f"{self._unsure} decides")
        elif isinstance(raw, Array) and any(re.match(r"\[[^\]]*\]\+?=", item) for item in raw.items):
            variables.forget(name, f"{raw}({' '.join(raw.items)})")
        elif isinstance(raw, Array):
            variables.set(name, [word for item in raw.items for word in variables.expanded(item)], add=bool(plus))
        elif index:
            variables.set_item(name, index[1:-1], variables.joined(value), add=bool(plus))
        else:
            variables.set(name, variables.joined(value), add=bool(plus))

    def _declare(self, words: list[str]) -> None:
        """``declare`` and its like: what an option changes of a variable, and its value."""
        options = {letter for word in words[1:] if word[0] == "-" for letter in word}
        own = words[0] in ("local", "declare", "typeset")
        for raw in (word for word in words[1:] if word[0] not in "-+"):
            name, value = re.split(r"[\[+=]", raw)[0], raw.partition("=")[2]
            if self._locals and own and "g" not in options:
                self._locals[-1].setdefault(name, self.variables.values.get(name))
            for each in (name, value) if own and options & {"n", "A"} else ():  # another's name; a dictionary
                if each.isidentifier():
                    self.variables.forget(each, " ".join(words), for_good=True)
            self.variables.integers |= {name} if "i" in options else set()
            if _ASSIGNMENT.fullmatch(raw):
                self._assign(raw)

    def _test(self, inner: list[str]) -> bool | None:
        """The value of a test; None where it is not known."""
        for operator, sure in (("||", True), ("-o", True), ("&&", False), ("-a", False)):
            if operator in inner:
                at = inner.index(operator)
                sides = [self._test(inner[:at]), self._test(inner[at + 1 :])]
                return sure if sure in sides else None if None in sides else not sure
        if any(map(UNKNOWN.search, inner)):
            return None
        match inner:
            case ["!", *rest]:
                value = self._test(rest)
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
                number = self.variables.arithmetic(f"({left}) {_COMPARE[compare]} ({right})")
                return None if UNKNOWN.search(number) else number == "1"
            case [word] if not word.startswith("-"):
                return True
        return None


def _split(text: str) -> list[str]:
    text = text.replace("\\\n", " ")
    try:
        return shlex.split(text, comments=False)
    except ValueError:
        return text.split()
