"""The verb that turns configurations of training frameworks into jobs, and jobs into configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stepsight.dataset.base.errors import StepsightError
from stepsight.verbs.chosen import JOB_FILE
from stepsight.verbs.options import Force, Json, answer, check_configuration, check_result, path


def job_command(
    configs: Annotated[
        list[Path],
        typer.Argument(
            parser=path,
            metavar="FROM...",
            help="Configuration files: one that states the model, and others such as DeepSpeed's JSON; or a job file.",
        ),
    ],
    *,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", parser=path, help="Job file (.toml) or configuration to write.")
    ] = None,
    hardware: Annotated[str, typer.Option(help="Name of the devices; configurations do not state it.")] = "",
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes.")] = None,
    devices_per_node: Annotated[int | None, typer.Option(min=1, help="Devices of a node.")] = None,
    given: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Set a key of the job, for example model.seq_len=4096. Repeatable."
        ),
    ] = None,
    define: Annotated[
        list[str] | None,
        typer.Option("--define", metavar="NAME=VALUE", help="Set a variable of a shell script. Repeatable."),
    ] = None,
    to: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            help="Write a configuration instead: megatron, megatron-script, torchtitan, deepspeed, accelerate, "
            "huggingface, nanotron or maxtext.",
        ),
    ] = "",
    pick: Annotated[
        str, typer.Option(help="Configuration to read from a file with several, for example llama3_8b.")
    ] = "",
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Turn the configuration of a training framework into a job, or a job into a configuration.

    The answer lists what was mapped, what was assumed and what no key of a job expresses. Formats: Megatron-LM (shell
    scripts, arguments, YAML of Megatron-Core and NeMo), torchtitan (TOML, Python registry), Hugging Face (config.json,
    Accelerate, DeepSpeed), Nanotron and MaxText (YAML). Nothing is executed. Examples:

        stepsight job pretrain_gpt.sh --hardware h100-sxm-80gb --nodes 16 --out job.toml
        stepsight job config.json ds_config.json --set model.seq_len=4096 --nodes 2
        stepsight job job.toml --to megatron-script --out train.sh
    """
    from stepsight.dataset.base.files import write_text
    from stepsight.dataset.configs.config_job import read_configs
    from stepsight.dataset.configs.writers import write_config
    from stepsight.experiments.reports.config_report import config_text, written_text
    from stepsight.verbs.config_options import given_of, refuse_program

    if out is not None:
        if not to and out.suffix != ".toml":
            raise StepsightError(f"--out ends in .toml, got {str(out)!r:.80}")
        for config in configs:
            if out.exists() and config.exists() and out.samefile(config):
                raise StepsightError(f"--out must not be a file that is read, got {str(out)!r:.80}: name a new file")
        if to:
            check_configuration(out, force)
        else:
            check_result("--out", out, JOB_FILE)
    for config in configs:
        refuse_program(config)
    stated = given_of(hardware, nodes, devices_per_node, given=given or (), define=define or (), pick=pick)
    read = read_configs(configs, stated)
    value, text = read.to_dict(), config_text(read)
    value["job"] = None if read.read is None else read.job.to_dict()
    content = read.to_toml() if out is not None and not to and read.job else ""
    if to:
        written = write_config(read.job, to)
        content, text = written.text, written_text(written, to)
        value |= {"config": content, "ignored": list(written.ignored), "notes": list(written.notes)}
    if out is not None:
        write_text(out, content)
        value["out"] = str(out)
        text += f"\n\nwrote {out}"
    elif to:
        text = content + text
    answer(value, text, as_json)
