"""Run a study of this folder: one parser of arguments and one way to print for all of them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stepsight.dataset.base.errors import StepsightError


@dataclass(frozen=True)
class Study:
    """An entry of ``stepsight experiment``.

    Attributes:
        name: Of the entry.
        about: What it measures, and what it needs.
        run: From the options to figures that JSON can hold, and the same as text.
        options: Flags, with the keywords that ``argparse`` takes; all studies also have ``--json``.
    """

    name: str
    about: str
    run: Callable[[argparse.Namespace], tuple[Any, str]]
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def main(self, arguments: Sequence[str]) -> int:
        """Parse the arguments, run, and print; returns the exit code."""
        parser = argparse.ArgumentParser(
            prog=f"stepsight experiment {self.name}",
            description=self.about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for flag, how in self.options.items():
            parser.add_argument(flag, **how)
        parser.add_argument("--json", action="store_true", help="print the figures as JSON")
        options = parser.parse_args(arguments)
        try:
            figures, text = self.run(options)
        except (StepsightError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        print(json.dumps(figures) if options.json else text)
        return 0
