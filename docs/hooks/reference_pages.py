"""MkDocs hook: makes the pages about job files and about the command line from the code."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from stepsight.cli.options import meanings
from stepsight.dataset.job.model_spec import TableSpec
from stepsight.dataset.job.sharding import TablePlacement
from stepsight.dataset.job.specs import OPTIONAL, SECTIONS, OtherDevices, SlowLink, Straggler

JOB_FILES, COMMAND_LINE = "reference/job-files.md", "reference/command-line.md"
NESTED = {
    "cluster.stragglers": Straggler,
    "cluster.slow_links": SlowLink,
    "cluster.mixed": OtherDevices,
    "model.tables": TableSpec,
    "sharding.tables": TablePlacement,
}
REQUIRED = dataclasses.MISSING

JOB_INTRO = """# Job files

A job file (TOML or JSON) has the tables below. Keys without a default are required. `framework = "megatron-core"`
before the first table fills what the file leaves open with what that framework does. The folder `examples/` holds job
files with comments. stepsight reports all broken rules of a file at once.

This page is generated from the specs.
"""
COMMAND_INTRO = """# Command line

Every verb has `--json` and `--help`. The answer goes to stdout, progress and errors to stderr. A mistake is one line
and exit code 2.

This page is generated from the parser.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    files.append(File.generated(config, JOB_FILES, content=job_files_page()))
    files.append(File.generated(config, COMMAND_LINE, content=command_line_page()))
    return files


def job_files_page() -> str:
    """The reference of job files: every key with its type, default and meaning."""
    parts = [JOB_INTRO]
    for name, spec in SECTIONS.items():
        optional = "This table may be left out." if name in OPTIONAL else ""
        parts.append(f"## `[{name}]`\n\n{_about(spec)}\n\n{optional}\n\n{_table(spec)}")
    for key, spec in NESTED.items():
        parts.append(f"## `[[{key}]]`\n\n{_about(spec)}\n\n{_table(spec)}")
    return "\n\n".join(parts)


def _about(spec: type) -> str:
    return inspect.cleandoc(spec.__doc__ or "").partition("Attributes:")[0].strip()


def _table(spec: type) -> str:
    told = meanings(spec)
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(spec):
        default = "**required**" if field.default is REQUIRED else f"`{_toml(field.default)}`"
        text = told.get(field.name, "").replace("|", "\\|").replace("``", "`")
        kind = str(field.type).replace(" | None", "").replace("|", "\\|")
        rows.append(f"| `{field.name}` | {kind} | {default} | {text} |")
    return "\n".join(rows)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return {None: "unset", (): "[]", "": '""'}.get(value, f'"{value}"' if isinstance(value, str) else str(value))


def command_line_page() -> str:
    """The reference of the command line: every verb with its arguments and options."""
    import typer

    from stepsight.cli import app

    group: Any = typer.main.get_command(app)
    parts = [COMMAND_INTRO]
    for name, command in group.commands.items():
        context: Any = type(group).context_class(command, info_name=f"stepsight {name}")
        usage = " ".join(command.collect_usage_pieces(context))
        parts.append(f"## stepsight {name}\n\n```\nstepsight {name} {usage}\n```\n\n{_help(command.help or '')}")
        parts.append(_parameters(command, context))
    return "\n\n".join(parts)


def _help(text: str) -> str:
    """Paragraphs of a help text; those that are indented are examples."""
    parts = []
    for paragraph in inspect.cleandoc(text).replace("\b\n", "").split("\n\n"):
        if paragraph.startswith("    "):  # a command or code
            parts.append(f"```console\n{textwrap.dedent(paragraph)}\n```")
        else:
            parts.append(_escaped(paragraph))
    return "\n\n".join(parts)


def _parameters(command: Any, context: Any) -> str:
    rows = ["| argument or option | meaning |", "|---|---|"]
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and "--help" not in parameter.opts:
            left, text = record
            rows.append(f"| `{left.replace('|', '/')}` | {_escaped(text)} |")
    return "\n".join(rows)


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("[", "\\[").replace("<", "&lt;")
