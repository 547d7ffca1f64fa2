"""The verb ``capture``: one training step of a user's script, as ranks of a fake world."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stepsight.dataset.errors import StepsightError
from stepsight.verbs.options import TIMELINE, Json, answer, check_result, load, path, progress

# Options stand before the script, and everything behind it is the script's.
CONTEXT = {"allow_interspersed_args": False}


def capture_command(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", parser=path, help="A training script.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS…", help="The script's arguments.")] = None,
    *,
    world_size: Annotated[int, typer.Option(help="Ranks of the job.")],
    out: Annotated[Path, typer.Option("--out", "-o", parser=path, help="New folder to write.")],
    rank: Annotated[int | None, typer.Option(help="Rank to capture; the same as --ranks with one number.")] = None,
    ranks: Annotated[
        str,
        typer.Option(
            help="Ranks to capture, for example 0,8,16. auto: rank 0, every rank that it reaches by messages (so that "
            "each pipeline stage is captured once), and the last rank of each all-to-all group (experts)."
        ),
    ] = "auto",
    devices_per_node: Annotated[int, typer.Option(help="Ranks on each node.")] = 8,
    warm_up: Annotated[int, typer.Option(help="Training steps before the captured one.")] = 1,
    device: Annotated[
        str, typer.Option(help="cuda, or cpu: the script finds no GPU and runs the ops of a CPU.")
    ] = "cuda",
    timeout: Annotated[float, typer.Option(help="Time limit for one rank, in seconds.")] = 600.0,
    as_json: Json = False,
) -> None:
    """Capture a training script as it would run on any number of GPUs; needs no GPU.

    The script runs unmodified on this machine, as one rank of the job. No other rank exists, tensors have shapes but no
    values, and collectives return at once. One training step is recorded: ops, collectives, streams and dependencies.
    Example:

        stepsight capture --world-size 1024 --out captured train.py --batch 8
        stepsight predict --program captured --hardware h100-sxm-80gb --fabric dgx-h100

    Values of tensors are not known: a script that reads a value gets 1 or False. Compiled regions run uncompiled.
    """
    from stepsight.dataset.capture.captured import check_capture_folder, write_captured
    from stepsight.dataset.capture.capturing_run import CaptureRequest, capture
    from stepsight.dataset.files import check_writable
    from stepsight.experiments.reports.capture_reports import capture_text

    if rank is not None and ranks != "auto":
        raise StepsightError(f"--rank and --ranks exclude each other, got {rank} and {ranks!r:.80}")
    request = CaptureRequest(
        script=script,
        arguments=tuple(arguments or ()),
        world_size=world_size,
        local_size=devices_per_node,
        ranks=(rank,) if rank is not None else _ranks(ranks),
        warm_up=warm_up,
        device=device,
        timeout_s=timeout,
    )
    check_capture_folder(out)
    check_writable(out)
    captured = capture(request, progress("ranks captured"))
    write_captured(captured, out)
    told = captured.to_dict() | {"out": str(out)}
    answer(told, capture_text(told), as_json)


def _ranks(text: str) -> tuple[int, ...]:
    if text == "auto":
        return ()
    words = text.split(",")
    if not all(word.strip().isascii() and word.strip().isdigit() for word in words):
        raise StepsightError(f"--ranks must be auto or numbers separated by commas, got {text!r:.80}")
    return tuple(dict.fromkeys(map(int, words)))


def predict_program(
    program: Path, predictor: Path | None, cluster: tuple[str, str], timeline: Path | None, *, as_json: bool
) -> None:
    """``stepsight predict --program``; ``cluster``: names of the hardware and of the fabric, empty if not given."""
    from stepsight.dataset.capture.captured import read_captured
    from stepsight.experiments.reports.capture_reports import program_text
    from stepsight.simulator.replay.captured_timeline import write_timeline
    from stepsight.training.predictor.captured_prediction import predict_captured

    if timeline is not None:
        check_result("--timeline", timeline, TIMELINE)
    prediction = predict_captured(read_captured(program), *cluster, load(predictor))
    told = prediction.to_dict()
    if timeline is not None:
        memory = [rank.live_bytes for rank in prediction.captured.ranks]
        write_timeline(prediction.step, memory, timeline, prediction.captured.script)
    answer(told, program_text(told), as_json)
