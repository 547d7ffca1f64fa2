"""Help texts of the verbs, as the command line shows them."""

from __future__ import annotations

import inspect

import typer

_VERBATIM = "\b\n"  # tells click not to wrap the paragraph that follows


def keep_examples(app: typer.Typer) -> None:
    """Print the indented paragraphs of each verb's docstring line by line, since they are commands or code."""
    for command in app.registered_commands:
        text = inspect.getdoc(command.callback) or ""
        paragraphs = (f"{_VERBATIM}{each}" if each.startswith("    ") else each for each in text.split("\n\n"))
        command.help = "\n\n".join(paragraphs)
