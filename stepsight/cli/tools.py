"""Verbs about files, and the studies: job, show, experiment."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from stepsight.cli.files import Force, check_job_output, stated_keys
from stepsight.cli.options import Answer, Written, pairs
from stepsight.dataset.base.errors import StepsightError


def job_command(
    configs: Annotated[list[Path], typer.Argument(metavar="FROM...")],
    *,
    out: Annotated[Path | None, "-o"] = None,
    hardware: str = "",
    nodes: Annotated[int | None, typer.Option(min=1)] = None,
    given: Annotated[list[str] | None, "--set", typer.Option(metavar="KEY=VALUE")] = None,
    define: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE")] = None,
    to: Annotated[str, typer.Option(metavar="FORMAT")] = "",
    pick: str = "",
    program: Path | None = None,
    force: Force = False,
) -> Answer:
    """Turn the configuration of a training framework into a job, or a job into a configuration.

    The answer lists what was mapped, what was assumed and what no key of a job expresses. Formats: Megatron-LM (shell
    scripts, arguments, YAML of Megatron-Core, Bridge and NeMo), torchtitan (TOML, Python registry), Hugging Face
    (config.json, Accelerate, DeepSpeed), Nanotron and MaxText (YAML). Nothing is executed. Examples:

        stepsight job pretrain_gpt.sh --hardware h100-sxm-80gb --nodes 16 --out job.toml
        stepsight job config.json ds_config.json --set model.seq_len=4096 --nodes 2
        stepsight job examples/gpt3-175b-1024.toml --to megatron-script --out train.sh
        stepsight job job.toml --program step

    Args:
        configs: Configuration files: one that states the model, and others such as DeepSpeed's JSON; or a job file.
        out: Job file (.toml) or configuration to write.
        hardware: Name of the devices; configurations do not state it.
        nodes: Number of nodes.
        given: Set a key of the job, for example model.seq_len=4096. Repeatable.
        define: Set a variable of a shell script. Repeatable.
        to: Write a configuration instead: megatron, megatron-script, torchtitan, deepspeed, accelerate, huggingface,
            nanotron or maxtext.
        pick: Configuration to read from a file with several, for example llama3_8b, or the number of a script's launch.
        program: Folder to write the ops of one step to: a graph for each pipeline stage, as `stepsight capture` does.
    """
    from stepsight.dataset.base.files import write_text
    from stepsight.dataset.configs.drafts import Given
    from stepsight.dataset.configs.formats import read_configs, write_config
    from stepsight.experiments.reports.job_texts import config_text, written_text

    check_job_output(out, to, configs, force)
    values = stated_keys(configs, given, hardware, nodes)
    read = read_configs(configs, Given(values=values, variables=pairs("--define", define), pick=pick))
    value, text = read.to_dict(), config_text(read)
    value["job"] = None if read.read is None else read.job.to_dict()
    content = read.to_toml() if out is not None and not to and read.job else ""
    if to:
        written = write_config(read.job, to)
        content, text = written.text, written_text(written, to)
        value |= {"config": content, "ignored": [*read.ignored, *written.ignored], "notes": list(written.notes)}
    if out is not None:
        write_text(out, content)
        value["out"] = str(out)
        text += f"\n\nwrote {out}"
    elif to:
        text = content + text
    if program is not None:
        from stepsight.dataset.capture.captured import write_captured
        from stepsight.simulator.replay.job_programs import captured_job

        write_captured(captured_job(read.job), program)
        value["program"] = str(program)
        text += f"\n\nwrote {program}"
    return Answer(value, text)


def show_command(
    path: Path | None = None,
    other: Path | None = None,
    *,
    table: Annotated[Path | None, Written((".parquet",), b"PAR1")] = None,
) -> Answer:
    """Describe a file or folder: what it is and what it contains; without one, list the names that can be described.
    Example:

        stepsight show examples/gpt3-175b-1024.toml

    Args:
        path: A job file, collection, run folder, graph dataset, captured script or program (FOLDER/rank0), table
            (.parquet) or summary.json; a predictor (folder or name); hardware, a fabric or a framework's profile (file
            or name).
        other: A second captured script or program: show what differs.
        table: For a collection: write every measured op and collective to this file (.parquet).
    """
    from stepsight.dataset.tables.formats import read_collection_table
    from stepsight.experiments.questions.describe import describe, names

    if path is not None and other is not None:
        from stepsight.dataset.capture.captured import read_captured
        from stepsight.experiments.reports.run_texts import captures_differ, difference_text

        told = captures_differ(read_captured(path).to_dict(), read_captured(other).to_dict())
        return Answer(told, difference_text(told))
    description = names() if path is None else describe(path)
    text = description.pop("text")
    if path is not None and table is not None:
        found = read_collection_table(path)
        found.to_parquet(table)
        description["measurements"] = len(found)
        text += f"\nwrote {len(found)} measurements to {table}"
    return Answer(description, text)


def experiment_command(
    context: typer.Context, name: Annotated[str, typer.Argument(help="A study; without a name all are listed.")] = ""
) -> None:
    """Run a study that measures an accuracy that the documentation states. Each study has its own options; all have
    `--json` and `--help`.

    Example:

        stepsight experiment memory
    """
    from importlib import import_module

    try:
        studies = import_module("stepsight.experiments.studies.runner").STUDIES
    except ModuleNotFoundError as error:
        if error.name != "stepsight.experiments.studies":
            raise
        rule = "experiments run from a checkout of stepsight, and this installation is not one"
        raise StepsightError(f"{rule}: clone the repository, run `pip install -e .` there, and try again") from None
    if name in ("", "-h", "--help"):
        told = "".join(f"\n  {each:<16}{studies[each].summary}" for each in sorted(studies))
        typer.echo(f"{context.get_help()}\n\nStudies:{told}")
        return
    if name not in studies:
        raise StepsightError(f"experiment must be one of {', '.join(sorted(studies))}, got {name!r:.80}")
    sys.exit(studies[name].main(context.args))
