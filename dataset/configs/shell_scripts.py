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
from stepsight.dataset.configs.shell_values import UNKNOWN, Variables, part_end

MOST_TOKENS, MOST_COMMANDS = 200_000, 20_000
_MOST_ROUNDS, _MOST_STEPS = 200, 20_000  # of one loop; statements of a script beyond which loops go around no more
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
    *("true", ":", "echo", "mkdir", "cd", "exit", "return", "rm", "cp", "trap", "ulimit", "break", "continue"),
    *("set", "shift", "printf", "unset"),
)
_FILLED = ("read", "mapfile", "readarray", "getopts")  # they set the variables that they name, or these:
_FILLED_ANYHOW = ("REPLY", "MAPFILE", "OPTARG", "OPTIND")
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
    reader.run(_statements(UNKNOWN.sub("?", text)), main=True)
    script = reader.script
    script.variables, script.unset, script.shown = variables.values, list(variables.unset), variables.shown
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
    place: tuple[int, int] = (0, 0)  # where its words begin and end in the text


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
            at, now.place = end_of_word, (now.place[0] if len(now.words) > 1 else at, end_of_word)
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
    name: str = ""  # of a function; the word of a ``case``; the variable of a ``for``; ``while`` or ``until``
    start: int = 0  # of a function's statements; where a loop goes on
    items: list[str] = field(default_factory=list)  # of a ``for``, for its next rounds
    rounds: int = 1  # of a loop
    sure: bool = True  # whether a loop goes around as often as in the shell
    before: dict[str, str | list[str]] | None = None  # variables at the beginning of a loop or a subshell
    apart: bool = False  # a subshell, whose variables are its own


class _Reader:
    """Reads the statements of a script, and follows those that would run."""

    def __init__(self, variables: Variables, folder: Path | None) -> None:
        self.script, self._variables, self._folder = ShellScript(), variables, folder
        self._functions: dict[str, list[_Statement]] = {}
        self._locals = list[dict[str, str | list[str] | None]]()  # of each function that runs: values outside of it
        self._sourced: set[Path] = set()
        self._calls = self._steps = 0
        self._last: bool | None = True  # the last command succeeded; None: not known
        self._said = self._program = ""  # the last command, and that of another program, which is taken to succeed
        self._unsure = ""  # the program on whose success the statement depends
        self._place, self._go_on = (0, 0), -1  # of the statement; the statement at which a loop goes on

    def run(self, statements: list[_Statement], *, main: bool = False) -> None:
        """Follow all statements; each may begin or end statements that hold others."""
        frames, after, place = [_Frame("", True, True)], "", 0
        while place < len(statements):
            statement, self._go_on = statements[place], -1
            self._place = statement.place if main else self._place
            words = statement.words
            runs = frames[-1].runs and after != ("&&" if self._decided(after) is False else "||")
            if statement.function:
                frames.append(_Frame("function", runs, False, name=statement.function, start=place + 1))
            while words and words[0] in _KEYWORDS and (frames[-1].patterns is None or words[0] == "esac"):
                if words[0] == "}" and frames[-1].kind == "function" and frames[-1].outer:
                    self._functions[frames[-1].name] = statements[frames[-1].start : place]
                words, depth = self._follow(words, frames, runs, place), len(frames)
                frames[-1].apart = frames[-1].apart or (after == "|" and depth > 1)
                runs = frames[-1].runs
            if self._go_on >= 0:
                place, after = self._go_on, ""
                continue
            if len(frames) > MOST_DEPTH:
                raise JobError(f"statements of a script must be nested at most {MOST_DEPTH} deep")
            place += 1
            if frames[-1].patterns is not None:
                self._choose(frames[-1], words, statement.end)
                continue
            if runs and (words or statement.documents):
                self._unsure = self._program if after in ("&&", "||") else ""
                self._carry_out(words, statement.documents)
                if words and words[0] in ("break", "continue", "return"):
                    self._leave(words[0], frames)
            if statement.end == "(":
                frames.append(_Frame("(", runs, runs, before=dict(self._variables.values), apart=True))
            elif statement.end == ")" and frames[-1].kind == "(":
                self._end(frames.pop())
            elif statement.end == ";;" and frames[-1].kind == "case":
                frames[-1].runs, frames[-1].patterns = False, []
            if statement.words or statement.end != "\n":
                after = statement.end
        if len(frames) > 1:
            end = _CLOSED_BY[frames[-1].kind]
            raise JobError(f"a script's statement must be closed by {end}, got the end of the file")

    def _decided(self, after: str = "||") -> bool | None:
        """Whether the last command succeeded; what is not known counts as false, and is listed."""
        if self._last is None and after in ("&&", "||"):
            self.script.undecided.append(self._said)
            self._last = False
        return self._last

    def _follow(self, words: list[str], frames: list[_Frame], runs: bool, place: int) -> list[str]:
        """Begin, go on with or end a statement that holds others; return the words after its own."""
        frame, variables = frames[-1], self._variables
        if _WITHIN.get(words[0], frame.kind) != frame.kind and (words[0], frame.kind) != ("}", "function"):
            raise JobError(f"a script's {words[0]} must end a statement that it belongs to, got one in {frame.kind!r}")
        before = dict(variables.values) if words[0] in ("for", "select", "while", "until") else None
        match words[0]:
            case "if":
                frames.append(_Frame("if", runs, runs))
                self._last, self._program = True, ""
            case "then":
                self._last = None if self._program else self._last
                frame.runs = frame.runs and self._decided() is True
                frame.taken = frame.taken or frame.runs
            case "elif" | "else":
                frame.runs = frame.outer and not frame.taken
                self._last, self._program = True, ""
            case "for" | "select":
                frames.append(_Frame("loop", runs, False, before=before, name="".join(words[1:2])))
                if runs:
                    self._begin_for(frames[-1], words)
                return []
            case "while" | "until" if frame.kind != "loop" or frame.start != place or frame.rounds == 1:
                frames.append(_Frame("loop", runs, runs, name=words[0], start=place, before=before))
            case "while" | "until":
                frame.runs = frame.outer
            case "do" if frame.name in ("while", "until"):
                known = None if self._program else self._last
                frame.sure, frame.runs = known is not None, frame.outer and known is not (frame.name == "until")
                frame.taken = frame.runs
            case "do":
                frame.start, frame.runs = place, frame.outer
                frame.taken = frame.outer
            case "case":
                word = variables.joined(words[1]) if runs and len(words) > 1 else ""
                frames.append(_Frame("case", runs, False, name=word, patterns=[]))
                return words[3:]
            case "{":
                frames.append(_Frame("{", runs, runs, before=dict(variables.values)))
            case "done" if self._goes_on(frame):
                self._go_on = frame.start
            case _:
                self._end(frames.pop())
                self._last = self._last if words[0] == "}" else True
        return words[1:]

    def _begin_for(self, frame: _Frame, words: list[str]) -> None:
        """The words of a ``for``; a loop over what is not known is read once."""
        items = [item for word in words[3:] for item in self._variables.expanded(word)]
        plain = words[0] == "for" and words[2:3] == ["in"] and not any(set("{*?[") & set(word) for word in words[3:])
        frame.sure = plain and not any(map(UNKNOWN.search, items))
        if not frame.sure:
            self._variables.forget(frame.name, " ".join(words))
        elif items:
            self._variables.set(frame.name, items[0])
        frame.items, frame.outer = items[1:], bool(items) or not frame.sure

    def _goes_on(self, frame: _Frame) -> bool:
        """Whether a loop has another round, which begins."""
        by_words = frame.name not in ("while", "until")
        if not frame.taken or not frame.sure or (by_words and not frame.items):
            return False
        frame.sure = frame.rounds < _MOST_ROUNDS and self._steps < _MOST_STEPS
        if frame.sure and by_words:
            self._variables.set(frame.name, frame.items.pop(0))
        frame.rounds += 1
        self._last = True
        return frame.sure

    def _end(self, frame: _Frame) -> None:
        """Restore what a subshell changed; what a loop changed is not known if its rounds are not."""
        values = self._variables.values
        if frame.apart and frame.before is not None:
            self._variables.values = frame.before
        elif frame.kind == "loop" and frame.before is not None and not frame.sure:
            for name in [name for name in values if values[name] != frame.before.get(name)]:
                self._variables.forget(name, f"{name}, which a loop changes")

    def _leave(self, word: str, frames: list[_Frame]) -> None:
        """Skip the rest of a loop's round (``continue``), of a loop (``break``) or of a function (``return``)."""
        loops = [at for at, frame in enumerate(frames) if frame.kind == "loop"]
        if word == "return" and self._locals:
            for frame in frames:
                frame.outer = frame.runs = frame.taken = False
        elif word != "return" and loops:
            for frame in frames[loops[-1] :]:
                frame.runs = False
            frames[loops[-1]].taken = word == "continue"

    def _choose(self, frame: _Frame, words: list[str], end: str) -> None:
        """Read patterns of a branch of a ``case``; behind the last one it is known whether the branch runs."""
        frame.patterns = [*(frame.patterns or ()), *words]
        if end == ")":
            unknown = UNKNOWN.search(frame.name) is not None
            if unknown and frame.outer and frame.patterns != ["*"]:
                self.script.undecided.append(f"case {self._variables.shown(frame.name)} in {' '.join(frame.patterns)}")
            patterns = [self._variables.joined(pattern) for pattern in frame.patterns]
            fits = any(pattern == "*" or (not unknown and fnmatchcase(frame.name, pattern)) for pattern in patterns)
            frame.runs, frame.patterns = frame.outer and not frame.taken and fits, None
            frame.taken = frame.taken or frame.runs

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
        saved = {word.split("=")[0].split("[")[0].rstrip("+"): None for word in words[:count]} if rest else {}
        saved = {name: variables.values.get(name) for name in saved}
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
                self._call(_statements(text.removeprefix("eval")), [])
            case _ if name in self._functions:
                self._call(self._functions[name], words[1:])
                return self._last
            case _ if name not in (*_SILENT, "false") and len(self.script.commands) < MOST_COMMANDS:
                self.script.commands.append(_flat(words))
                self.script.places.append(self._place)
                self._program = self._said
        return name != "false"

    def _source(self, named: str) -> None:
        path = None if self._folder is None else self._folder / Path(named).name
        if path is None or not path.is_file() or UNKNOWN.search(path.name):
            self.script.unread.append(f"source {self._variables.shown(named)}: what it sets is not known")
        elif path not in self._sourced:
            self._sourced.add(path)
            self.run(_statements(read_text(path, "utf-8-sig")))

    def _call(self, statements: list[_Statement], arguments: list[str]) -> None:
        """Run a function, with variables of its own."""
        if self._calls < _MOST_CALLS and len(self.script.commands) < MOST_COMMANDS:
            held = {name: value for name, value in self._variables.values.items() if not name.isidentifier()}
            self._calls += 1
            self._locals.append({})
            if arguments:
                self._set_arguments(arguments)
            self.run(statements)
            self._set_arguments([])
            self._restore({**held, **self._locals.pop()})
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
        elif isinstance(raw, _Array):
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
