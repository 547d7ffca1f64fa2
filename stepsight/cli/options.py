"""Commands made of Python signatures: an option is declared once, as a parameter or as a field of a dataclass.

A verb is a function.  Its parameters before ``*`` become arguments, the others options: ``timeout_s`` is
``--timeout-s``.  A parameter that is annotated with a dataclass stands for one option for each of its fields.  What an
option means is in the docstring, under ``Args:`` or ``Attributes:``.  Tuples are written with commas, numbers by name
as ``NAME=NUMBER``.  An annotation may add a name of the option (``"--study"`` replaces its own, ``"-p"`` is
another one), what Typer shall know (``typer.Option(min=1)``), a dataclass that has a field of this name with its
meaning, or ``Written`` for a file that the verb writes.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo

from stepsight.dataset.base.errors import StepsightError, printable
from stepsight.dataset.base.files import named_path

Positive = Annotated[int, typer.Option(min=1)]
JSON = typer.Option("--json", help="Print the answer as JSON, and nothing else, on stdout.")
_VERBATIM = "\b\n"  # tells click not to wrap the paragraph that follows


class Answer(NamedTuple):
    """What a verb answers.

    Attributes:
        value: For programs.
        text: For people.
        error: Why the command fails all the same; empty: the answer says it.
        then: What the command does once the answer is printed, such as serving a page.
    """

    value: dict[str, Any]
    text: str
    error: str | None = None
    then: Callable[[], None] | None = None


class Written(NamedTuple):
    """A file that a verb writes; it is checked before the work.

    Attributes:
        suffixes: Allowed ones.
        begins: Pattern of the first bytes of a file that may be overwritten: one that the verb wrote itself.
    """

    suffixes: tuple[str, ...]
    begins: bytes = b""

    def checked(self, option: str, wanted: Path | None) -> Path | None:
        """Return the file if it can be written and replaces none of another type; None: no file is wanted."""
        from stepsight.dataset.base.files import check_output_file

        if wanted is None:
            return None
        if wanted.suffix not in self.suffixes:
            raise StepsightError(f"{option} ends in {', '.join(self.suffixes)}, got {str(wanted)!r:.80}")
        check_output_file(wanted)
        if wanted.exists():
            with wanted.open("rb") as file:
                begins = file.read(64)
            if not re.match(self.begins, begins):
                raise StepsightError(f"{option} refuses to overwrite a file of another type, got {str(wanted)!r:.80}")
        return wanted


def command(verb: Callable[..., Answer]) -> Callable[..., None]:
    """Make a function for ``typer.Typer.command`` of a verb: with all options, help texts and ``--json``."""
    hints, told = get_type_hints(verb, include_extras=True), meanings(verb)
    settings: dict[str, Any] = {}
    reads: dict[str, Callable[[Any], Any]] = {}
    parameters: list[Parameter] = []
    for name, parameter in inspect.signature(verb).parameters.items():
        kind, is_option = hints[name], parameter.kind is Parameter.KEYWORD_ONLY
        if kind is typer.Context:
            parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind))
            continue
        declared: Iterable[_Declared] = [(name, kind, parameter.default, told.get(name, ""), is_option)]
        if is_dataclass(kind):
            settings[name], declared = kind, _field_options(kind, parameter.default)
        for option in declared:
            made, read = _option(*option)
            parameters.append(made)
            reads |= {made.name: read} if read else {}
    parameters.append(Parameter("as_json", Parameter.KEYWORD_ONLY, annotation=Annotated[bool, JSON], default=False))

    def run(*, as_json: bool, **given: Any) -> None:
        _notes.clear()
        for name, read in reads.items():
            given[name] = read(given[name])
        for name, kind in settings.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind) if field.name in given})
        answer = verb(**given)
        for text in _notes:
            typer.echo(text, err=True)
        typer.echo(json.dumps(answer.value, allow_nan=False) if as_json else printable(answer.text))
        if answer.error is not None:
            if answer.error:
                typer.echo(f"error: {printable(answer.error)}", err=True)
            raise typer.Exit(2)
        if answer.then is not None:
            sys.stdout.flush()
            answer.then()

    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__doc__ = help_text(verb)
    return run


def help_text(verb: Callable[..., Any]) -> str:
    """The docstring without its sections; indented paragraphs, which are commands or code, are printed line by line."""
    text = re.split(r"\n\nArgs:\n", inspect.getdoc(verb) or "")[0]
    paragraphs = (f"{_VERBATIM}{each}" if each.startswith("    ") else each for each in text.split("\n\n"))
    return "\n\n".join(paragraphs)


def meanings(thing: Any) -> dict[str, str]:
    """What docstrings say of each parameter of a function, or of each field of a class and its bases."""
    found: dict[str, str] = {}
    for each in reversed(inspect.getmro(thing)[:-1]) if inspect.isclass(thing) else [thing]:
        section = re.split(r"(?:Args|Attributes):\n", inspect.cleandoc(each.__doc__ or ""), maxsplit=1)
        entries = re.split(r"\n\n(?=\S)", section[1])[0] if len(section) > 1 else ""
        for entry in re.split(r"\n(?=\S)", textwrap.dedent(entries).strip("\n")):
            names, _, text = entry.partition(": ")
            found |= {name.strip(): " ".join(text.split()) for name in names.split(",") if text}
    return found


_Declared = tuple[str, Any, Any, str, bool]  # name, annotation, default, meaning, whether it is an option


def _field_options(kind: Any, default: Any) -> Iterator[_Declared]:
    """The fields of a dataclass; ``default``: an instance whose values are the defaults."""
    hints, told = get_type_hints(kind, include_extras=True), meanings(kind)
    for field in fields(kind):
        usual = getattr(default, field.name) if default is not Parameter.empty else field.default
        if usual is MISSING:
            usual = Parameter.empty if field.default_factory is MISSING else field.default_factory()
        yield field.name, hints[field.name], usual, told.get(field.name, ""), True


def _option(
    name: str, kind: Any, default: Any, meaning: str, is_option: bool
) -> tuple[Parameter, Callable[[Any], Any] | None]:
    """A parameter as Typer wants it, and the function that makes its value, if it has one."""
    extras = getattr(kind, "__metadata__", ())
    kind = get_args(kind)[0] if extras else kind
    info = copy.copy(next((each for each in extras if isinstance(each, OptionInfo | ArgumentInfo)), None))
    info = info or (typer.Option() if is_option else typer.Argument())
    names = [each for each in extras if isinstance(each, str)]
    own = f"--{name.replace('_', '-')}"
    if is_option:
        info.param_decls = names if any(each.startswith("--") for each in names) else [own, *names]
    shown = names[0] if names else own
    source = next((each for each in extras if is_dataclass(each)), None)
    info.help = info.help or (meanings(source)[name] if source else meaning).replace("``", "`")
    assert info.help, f"{name} needs a meaning in a docstring"
    written = next((each for each in extras if isinstance(each, Written)), None)
    read: Callable[[Any], Any] | None = partial(written.checked, own) if written else None
    if get_origin(kind) is tuple:
        read = partial(comma_separated, shown, get_args(kind)[0], default)
        kind, default, info.metavar = str | None, None, info.metavar or "VALUE,VALUE…"
    elif get_origin(kind) is dict:
        read = partial(pairs, shown, read=float)
        kind, default, info.metavar = list[str] | None, None, info.metavar or "WHAT=NUMBER"
    elif kind == float | str:
        kind = str
    elif {int, float} & {kind, *get_args(kind)}:
        read = partial(_bounded, shown)
    elif kind is str and default == "" and is_option:
        read, kind, default = partial(_stated, shown), str | None, None
    if Path in (kind, *get_args(kind), *(part for each in get_args(kind) for part in get_args(each))):
        info.parser = _path
    return Parameter(name, Parameter.KEYWORD_ONLY, annotation=Annotated[kind, info], default=default), read


_notes: dict[str, None] = {}  # of the verb that runs, each once


def note(text: str) -> None:
    """Print a line on stderr before the answer; an error is the only output of a verb."""
    _notes[printable(text)] = None


def _path(text: str | Path) -> Path:
    try:
        return named_path(str(text))  # a default is a path already
    except StepsightError as error:
        raise typer.BadParameter(str(error)) from None


def _bounded(option: str, number: float | None) -> float | None:
    """Refuse what no size is: infinity, what is no number, and whole numbers of hundreds of digits."""
    most = 2**63 if isinstance(number, int) else sys.float_info.max
    if number is not None and not abs(number) <= most:
        raise StepsightError(f"{option} must lie within +-{most:.3g}, got {number!r:.40}")
    return number


def _stated(option: str, text: str | None) -> str:
    """Read a text; refuse an empty one, which would count as not given."""
    if text == "":
        raise StepsightError(f"{option} must not be empty, got ''")
    return text or ""


def comma_separated(option: str, kind: type, default: Any, text: str | None) -> Any:
    """Read ``A,B``: words, or whole numbers if ``kind`` is int; the default if the option is not given."""
    if text is None:
        return default
    found = tuple(word.strip() for word in text.split(","))
    if not all(found) or (kind is int and not all(word.isascii() and word.isdigit() for word in found)):
        what = "whole numbers" if kind is int else "words"
        raise StepsightError(f"{option} must be {what}, separated by commas, got {text!r:.80}")
    return tuple(_bounded(option, int(word[:40])) if kind is int else kind(word) for word in found)  # 40: too large


def pairs(option: str, texts: Iterable[str] | None, read: Callable[[str], Any] = str) -> dict[str, Any]:
    """Read ``KEY=VALUE``; ``read`` makes the value of its text, and raises ValueError if it is none."""
    found = {}
    for text in texts or ():
        key, _, value = text.rpartition("=") if read is float else text.partition("=")
        key = key.strip()
        if key in found:
            raise StepsightError(f"{option} takes each key once, got {key!r:.80} twice")
        try:
            found[key] = read(value)
            if not key or "=" not in text:
                raise ValueError
        except StepsightError:
            raise
        except ValueError:
            kind = "NUMBER" if read in (int, float) else "VALUE"
            raise StepsightError(f"{option} must be KEY={kind}, got {text!r:.80}") from None
    return found


def refuse_given(context: typer.Context, names: Iterable[str], why: str) -> None:
    """Refuse parameters of the verb that stand on the command line and change nothing here; ``why`` and what to do
    completes "--option ...".
    """
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = next(each for each in context.command.params if each.name == name)
            raise StepsightError(f"{option.opts[0] if option.opts[0] != name else name} {why}")


def progress(what: str) -> Callable[..., None]:
    """Show on stderr how much is done, of how many if that is known, and further text.

    On a terminal it is one line that changes, elsewhere a line every ten seconds; nothing is said of what is quick.
    """
    last, pause = time.monotonic(), 0.2 if sys.stderr.isatty() else 10.0

    def show(done: int, of: int | str, more: str = "") -> None:
        nonlocal last
        line = "" if pause < 1 and done == of else f"{what} {done}{f'/{of}' if of else ''}  {printable(more)}".rstrip()
        if not line or time.monotonic() - last >= pause:
            last = time.monotonic()
            typer.echo(f"\r\x1b[K{line}" if pause < 1 else line, nl=pause >= 1, err=True)

    return show
