"""A study: one parser of arguments, one way to print, and one kind of table for all of this folder."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import textwrap
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from stepsight.dataset.base.errors import StepsightError

Row = dict[str, Any]
Options = Mapping[str, Mapping[str, Any]]  # by flag: keywords that ``argparse`` takes
_LEAST = {"seed": 0, "teach": 0, "folds": 2}  # of these numbers; of other whole ones 1


def cases(study: str) -> Row:
    """The models, strategies and runs of a study, as ``cases.toml`` beside this file lists them."""
    tables: dict[str, Row] = tomllib.loads(Path(__file__).with_name("cases.toml").read_text("utf-8"))
    return tables[study]


def figures_text(figures: Row) -> str:
    """The single figures of a study, in one line."""
    words = {key: f"{value:.3f}" for key, value in figures.items() if isinstance(value, float)}
    words |= {key: str(value) for key, value in figures.items() if isinstance(value, int)}
    return "; ".join(f"{key.replace('_', ' ')} {word}" for key, word in words.items())


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise StepsightError(f"{message}; {self.prog} --help lists the options")


@dataclass(frozen=True)
class Study:
    """An entry of ``stepsight experiment``."""

    name: str  # of the entry
    about: str  # what it measures, and what it needs: paragraphs, the first sentence says it alone
    run: Callable[[argparse.Namespace], tuple[Any, str]]  # to figures that JSON can hold, and the same as text
    options: Options = field(default_factory=dict)  # all studies also have ``--json``

    @property
    def summary(self) -> str:
        """The first sentence of ``about``, in one line."""
        first = re.split(r"(?<=\.)\s", self.about.strip())[0]
        return " ".join(first.split()).removesuffix(".").replace("``", "`")

    def main(self, arguments: Sequence[str]) -> int:
        """Parse the arguments, run, and print; returns the exit code."""
        width = shutil.get_terminal_size().columns - 2
        parts = self.about.strip().replace("``", "`").split("\n\n")  # an indented one is code
        about = "\n\n".join(part if part.startswith(" ") else textwrap.fill(part, width) for part in parts)
        name, form = f"stepsight experiment {self.name}", argparse.RawDescriptionHelpFormatter
        parser = _Parser(prog=name, description=about, formatter_class=form)
        for flag, how in self.options.items():
            parser.add_argument(flag, **how)
        parser.add_argument("--json", action="store_true", help="print the figures as JSON")
        try:
            options = parser.parse_args(arguments)
            for name, value in vars(options).items():
                least = _LEAST.get(name, 1 if type(value) is int else sys.float_info.min)
                if type(value) in (int, float) and not value >= least:
                    raise StepsightError(f"--{name.replace('_', '-')} must be a number >= {least:.3g}, got {value}")
            figures, text = self.run(options)
        except (StepsightError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        print(json.dumps(figures, allow_nan=False) if options.json else text)
        return 0
