"""``stepsight emulate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stepsight.verbs.options import Json, answer, path


def emulate_command(
    script: Annotated[Path, typer.Argument(parser=path, metavar="SCRIPT", help="Your training script, unmodified.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ARGS…", help="Arguments of the script. Options of emulate must come before the script."
        ),
    ] = None,
    *,
    world_size: Annotated[int, typer.Option(min=1, help="Ranks of the world.")],
    ranks: Annotated[
        str,
        typer.Option(
            "--ranks",
            "--rank",
            help="Ranks that run for real, for example 0,8. They exchange values with each other.",
        ),
    ] = "0",
    devices_per_node: Annotated[int, typer.Option(min=1, help="Ranks that share a node.")] = 8,
    delays: Annotated[
        str,
        typer.Option(
            help="Model of the delays of collectives: `alpha-beta` (latency and bandwidth of --fabric), `predictor`, "
            "or your own Python file with a function seconds(kind, num_bytes, group_size, ranks_per_node). The file "
            "is run."
        ),
    ] = "alpha-beta",
    fabric: Annotated[str, typer.Option(help="Fabric of the world: a name or a file.")] = "",
    predictor: Annotated[
        Path | None,
        typer.Option(
            "--predictor",
            "-p",
            parser=path,
            help="With `--delays predictor`: a folder, or the name of a shipped predictor.",
        ),
    ] = None,
    extra_ms: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHAT=MS",
            help="Add MS milliseconds to collectives. WHAT is `all`, a kind (all_reduce), group:RANKS (groups of this "
            "size) or bytes:N (N bytes or more). Repeatable.",
        ),
    ] = None,
    virtual: Annotated[
        bool,
        typer.Option(
            "--virtual",
            help="Use a virtual clock: delays are added up instead of waited for, and streams overlap as on a device. "
            "Computation is the CPU time of the script's thread plus its sleeps.",
        ),
    ] = False,
    warmup: Annotated[int, typer.Option(min=1, help="Steps before the first round.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of timed steps.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps per round.")] = 4,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=1, help="Time within which the measured steps must be done.")
    ] = 600.0,
    as_json: Json = False,
) -> None:
    """Run one or more ranks of your script; modelled delays replace all other ranks.

    Scripts with DDP, FSDP2, tensor parallelism and pipelines run unmodified. Each collective completes, in order, when
    its modelled delay has passed; the script computes meanwhile. Values from ranks that do not run are placeholders.
    Examples:

        stepsight emulate --world-size 256 --fabric dgx-h100 train.py --lr 0.1
        stepsight emulate --world-size 256 --ranks 0,8 --fabric dgx-h100 train.py --lr 0.1
        stepsight emulate --world-size 256 --delays my_delays.py --extra-ms all_reduce=5 --virtual train.py
    """
    from stepsight.dataset.hardware.hardware import find_fabric
    from stepsight.experiments.tasks.emulating import Emulation, Extra, delays_of, emulate
    from stepsight.training.registered import load_predictor
    from stepsight.verbs.script_arguments import rank_numbers

    learned = load_predictor(predictor) if predictor is not None else None
    links = find_fabric(fabric) if fabric else None
    asked = Emulation(
        path=script,
        arguments=arguments or [],
        world_size=world_size,
        ranks=rank_numbers(ranks),
        devices_per_node=devices_per_node,
        virtual=virtual,
        counts={"warmup": warmup, "rounds": rounds, "steps": steps},
        timeout_s=timeout_s,
    )
    found = emulate(asked, delays_of(delays, links, learned, [Extra.parse(text) for text in extra_ms or ()]))
    answer(found, found["text"], as_json)
