"""The part of a command line with a user's script and its arguments, in torchrun's form."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from stepsight.dataset.base.errors import StepsightError

WORDS = "script_arguments"  # key of the script's own arguments in the context
_KEPT = "--nproc-per-node"
_WITH_VALUE = (
    "--nnodes", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--max-restarts", "--monitor-interval",
    "--start-method", "--redirects", "-r", "--tee", "-t", "--log-dir", "--node-rank", "--master-addr", "--master-port",
    "--local-addr", "--local-ranks-filter",
)  # fmt: skip
_FLAGS = ("--standalone",)
_REFUSED = ("-m", "--module", "--no-python", "--run-path")
_OURS_AT_THE_END = {"--out": 2, "-o": 2, "--json": 1}  # and the number of words of each


def rank_numbers(text: str) -> tuple[int, ...]:
    """Ranks of ``--ranks 0,8,16``.

    Raises:
        StepsightError: If they are no numbers.
    """
    words = text.split(",")
    if not all(word.strip().isascii() and word.strip().isdigit() for word in words):
        raise StepsightError(f"--ranks must be numbers separated by commas, as 0,8,16, got {text!r:.80}")
    return tuple(dict.fromkeys(map(int, words)))


class ScriptCommand(TyperCommand):
    """A command that takes ``--script [torchrun's options] FILE ARGS…`` as its last option.

    What follows the file is the script's, but ``--out`` and ``--json`` at the very end, unless they came before.
    Options of torchrun that concern several nodes or its rendezvous change nothing on one machine and are left out.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        at = next((place for place, word in enumerate(args) if word.partition("=")[0] == "--script"), None)
        if at is None:
            return super().parse_args(ctx, args)
        ours, options = args[:at], args[at + 1 :]
        if "=" in args[at]:
            options.insert(0, args[at].partition("=")[2])
        launch, words = _launch_options(options)
        if not words or words[0].startswith("-"):
            raise StepsightError(f"--script takes a Python file and its arguments, got {' '.join(options)!r:.80}")
        stated, _ = _launch_options(ours, everywhere=True)
        own, last = _our_last_words(words[1:], ours)
        ctx.meta[WORDS] = own
        return super().parse_args(ctx, [*stated, *launch, *last, "--script", words[0]])


def _launch_options(words: list[str], everywhere: bool = False) -> tuple[list[str], list[str]]:
    """Words without torchrun's, and the words from the first one that is no option of torchrun.

    Args:
        words: Of the command line.
        everywhere: Torchrun's options may stand between others, which stay where they are.
    """
    kept: list[str] = []
    left = list(words)
    while left:
        name, equals, value = left[0].partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        if name == _KEPT:
            kept += [name, value] if equals else [name, *left[1:2]]
        elif name in _REFUSED:
            raise StepsightError(f"--script takes the file of a Python script, got torchrun's {name}")
        elif name == "--nnodes" and (value if equals else "".join(left[1:2])) not in ("1", "1:1"):
            raise StepsightError("a script is collected on one machine: --nnodes must be 1")
        elif name not in (*_WITH_VALUE, *_FLAGS):
            if not everywhere:
                break
            kept.append(left.pop(0))
            continue
        left = left[2 if name in (*_WITH_VALUE, _KEPT) and not equals else 1 :]
    return kept, left


def _our_last_words(words: list[str], before: list[str]) -> tuple[list[str], list[str]]:
    """The script's arguments, and stepsight's own after them."""
    last: list[str] = []
    while True:
        for name, count in _OURS_AT_THE_END.items():
            if len(words) >= count and words[len(words) - count] == name and name not in (*before, *last):
                words, last = words[: len(words) - count], [*words[len(words) - count :], *last]
                break
        else:
            return words, last
