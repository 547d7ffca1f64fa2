"""The verb ``capture``: one training step of a user's script, as ranks of a fake world."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepsight.dataset.base.errors import StepsightError
from stepsight.verbs.options import TIMELINE, Json, answer, check_result, load, path, progress
from stepsight.verbs.script_arguments import rank_numbers

if TYPE_CHECKING:
    from stepsight.dataset.capture.captured import Captured

# Options stand before the script, and everything behind it is the script's.
CONTEXT = {"allow_interspersed_args": False}


def capture_command(
    script: Annotated[
        Path,
        typer.Argument(metavar="SCRIPT", parser=path, help="A training script, or a model: an .onnx or a .pt2 file."),
    ],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS…", help="The script's arguments.")] = None,
    *,
    world_size: Annotated[int, typer.Option(help="Ranks of the job.")],
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", parser=path, help="Folder to write: new, or an earlier capture, which is replaced."
        ),
    ],
    rank: Annotated[int | None, typer.Option(help="Rank to capture; short for --ranks with one number.")] = None,
    ranks: Annotated[
        str,
        typer.Option(
            help="Ranks to capture, for example 0,8,16. auto: rank 0, every rank to which it sends messages, directly "
            "or through others (one of each pipeline stage), and the last rank of each all-to-all group (experts)."
        ),
    ] = "auto",
    devices_per_node: Annotated[int, typer.Option(help="Ranks on each node.")] = 8,
    warm_up: Annotated[int, typer.Option(help="Training steps before the captured one.")] = 1,
    device: Annotated[str, typer.Option(help="cuda, or cpu: the script then finds no GPU and runs CPU ops.")] = "cuda",
    timeout: Annotated[float, typer.Option(help="Time limit for one rank, in seconds.")] = 600.0,
    inference: Annotated[bool, typer.Option("--inference", help="For a model: only the forward pass.")] = False,
    dims: Annotated[str, typer.Option(help="For a model: sizes of symbolic dimensions, as batch=8,seq=1024.")] = "",
    precision: Annotated[
        str, typer.Option(help="For a model: fp32, bf16 or fp16; replaces the floating-point type of the file.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Capture a training script as it would run on any number of GPUs; needs no GPU.

    The script runs unmodified on this machine, as one rank of the job. No other rank exists, tensors have shapes but no
    values, and collectives return at once. One training step is recorded: ops, collectives, streams and dependencies.
    Example:

        stepsight capture --world-size 1024 --out captured train.py --batch 8
        stepsight predict --program captured --hardware h100-sxm-80gb --fabric dgx-h100

    Values of tensors are not known: a script that reads a value gets 1 or False. Tokens are spread evenly over experts.
    Regions of torch.compile are read as Inductor fuses them, for GPUs too.

    A model in a file (ONNX, or a file of torch.export.save) is read and not run. For training, the backward, AdamW and
    the all-reduce of gradients between --world-size replicas are derived from its forward:

        stepsight capture --world-size 16 --dims batch=8,seq=1024 --precision bf16 --out gpt2 gpt2.onnx
    """
    from stepsight.dataset.base.files import check_writable
    from stepsight.dataset.capture.captured import check_capture_folder
    from stepsight.dataset.capture.capturing_run import CaptureRequest, capture
    from stepsight.dataset.capture.model_files import ModelRequest, is_model, read_model

    if is_model(script):
        if arguments:
            raise StepsightError(f"a model takes no arguments, got {' '.join(arguments)!r:.80}: options go before it")
        model = ModelRequest(script, world_size, devices_per_node, not inference, sizes_of(dims), precision)
        check_capture_folder(out)
        check_writable(out)
        _write(read_model(model), out, as_json=as_json)
        return
    if inference or dims or precision:
        raise StepsightError("--inference, --dims and --precision are for models: an .onnx or a .pt2 file")
    if rank is not None and ranks != "auto":
        raise StepsightError(f"--rank and --ranks exclude each other, got {rank} and {ranks!r:.80}")
    request = CaptureRequest(
        script=script,
        arguments=tuple(arguments or ()),
        world_size=world_size,
        local_size=devices_per_node,
        ranks=(rank,) if rank is not None else () if ranks == "auto" else rank_numbers(ranks),
        warm_up=warm_up,
        device=device,
        timeout_s=timeout,
    )
    check_capture_folder(out)
    check_writable(out)
    _write(capture(request, progress("ranks captured")), out, as_json=as_json)


def _write(captured: Captured, out: Path, *, as_json: bool) -> None:
    """Write a capture, and print what it holds."""
    from stepsight.dataset.capture.captured import write_captured
    from stepsight.experiments.reports.capture_reports import capture_text

    write_captured(captured, out)
    told = captured.to_dict() | {"out": str(out)}
    answer(told, capture_text(told), as_json)


def sizes_of(text: str) -> dict[str, int]:
    """Sizes of dimensions, written as ``batch=8,seq=1024``."""
    found: dict[str, int] = {}
    for word in filter(None, map(str.strip, text.split(","))):
        name, _, size = word.partition("=")
        if not name or not (size.isascii() and size.isdigit()):
            raise StepsightError(f"--dims must be names and sizes, as batch=8,seq=1024, got {word!r:.80}")
        found[name] = int(size)
    return found


def predict_program(
    program: Path, predictor: Path | None, cluster: tuple[str, str], timeline: Path | None, *, as_json: bool
) -> None:
    """``stepsight predict --program``; ``cluster``: names of the hardware and of the fabric, empty if not given."""
    from stepsight.dataset.capture.captured import read_captured
    from stepsight.dataset.capture.model_files import ModelRequest, is_model, read_model
    from stepsight.experiments.reports.capture_reports import program_text
    from stepsight.simulator.replay.captured_step import write_timeline
    from stepsight.training.predictor.captured_prediction import predict_captured

    if timeline is not None:
        check_result("--timeline", timeline, TIMELINE)
    reads_model = is_model(program) and program.is_file()
    captured = read_model(ModelRequest(program)) if reads_model else read_captured(program)
    prediction = predict_captured(captured, *cluster, load(predictor))
    told = prediction.to_dict()
    if timeline is not None:
        memory = [rank.live_bytes for rank in prediction.captured.ranks]
        write_timeline(prediction.step, memory, timeline, prediction.captured.script)
    answer(told, program_text(told), as_json)
