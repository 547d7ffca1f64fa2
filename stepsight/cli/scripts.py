"""Verbs for a training script of the user: capture and emulate; and ``--script FILE ARGS…`` of collect."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from stepsight.cli.files import load_predictor
from stepsight.cli.options import Answer, comma_separated, pairs, progress, refuse_given
from stepsight.dataset.base.errors import StepsightError
from stepsight.experiments.tasks.settings import Emulation

if TYPE_CHECKING:
    from stepsight.dataset.capture.captured import Captured
    from stepsight.training.predictor.predictor import Predictor

WORDS = "script_arguments"  # key of the script's own arguments in the context
_KEPT = "--nproc-per-node"
_WITH_VALUE = (
    "--nnodes", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--max-restarts", "--monitor-interval",
    "--start-method", "--redirects", "-r", "--tee", "-t", "--log-dir", "--node-rank", "--master-addr", "--master-port",
    "--local-addr", "--local-ranks-filter",
)  # fmt: skip
_REFUSED = ("-m", "--module", "--no-python", "--run-path")
_ENDED = "the script ended itself"  # as harness.scripts.launch says
_OURS_AT_THE_END = {"--out": 2, "-o": 2, "--json": 1}  # and the number of words of each


class ScriptLast(TyperCommand):
    """A command whose last words are a script and its arguments; errors say where its own options belong."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            words = (*args, *ctx.meta.get(WORDS, ()))  # an option before the script would not be missing
            if type(error).__name__ == "MissingParameter" and (told := self._misplaced(error.format_message(), words)):
                raise StepsightError(told) from None
            raise

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except StepsightError as error:
            words = ctx.meta.get(WORDS, ctx.params.get("arguments"))
            error.args = (self._misplaced(str(error), words or ()) or str(error),)
            raise

    def _misplaced(self, text: str, words: Sequence[str]) -> str:
        """An error that names one of our options among the script's words, or tells that the script ended itself, with
        where options go; empty if there is none.
        """
        ours = {name for each in self.params for name in each.opts if name.startswith("-")}
        given = [name for name in dict.fromkeys(word.partition("=")[0] for word in words) if name in ours]
        named = [name for name in given if re.search(rf"(?<![\w-]){name}(?![\w-])", text) or _ENDED in text]
        if not named:
            return ""
        rule = f"options of `stepsight {self.name}` come before the script"
        return f"{text.removesuffix('.')}; {rule}, which gets {', '.join(named)}"


class ScriptCommand(ScriptLast):
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
        own, last = words[1:], list[str]()
        for name, count in [*_OURS_AT_THE_END.items()] * 2:  # in any order
            if own[-count : len(own) - count + 1] == [name] and name not in (*ours, *last):
                own, last = own[:-count], own[-count:] + last
        ctx.meta[WORDS] = own
        return super().parse_args(ctx, [*stated, *launch, *last, "--script", words[0]])


def _launch_options(words: list[str], everywhere: bool = False) -> tuple[list[str], list[str]]:
    """Words without torchrun's, and the words from the first one that is no option of torchrun; ``everywhere``:
    torchrun's options may stand between others, which stay where they are.
    """
    kept, left = list[str](), list(words)
    while left:
        name, equals, value = left[0].partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        value, size = (value, 1) if equals or name not in (*_WITH_VALUE, _KEPT) else ("".join(left[1:2]), 2)
        if name in _REFUSED:
            raise StepsightError(f"--script takes the file of a Python script, got torchrun's {name}")
        if name == "--nnodes" and value not in ("1", "1:1"):
            raise StepsightError("a script is collected on one machine: --nnodes must be 1")
        if name == _KEPT:
            kept += [name, value] if value or equals else [name]
        elif name not in (*_WITH_VALUE, "--standalone"):
            if not everywhere:
                break
            kept.append(left[0])
        left = left[size:]
    return kept, left


def _capturer(
    script: Path, arguments: list[str], model: tuple[bool, str, str], run: dict[str, Any], ranks: str
) -> Callable[[int], Captured]:
    """What captures a script, or reads a model, for a world size; ``model``: inference, dimensions and precision."""
    from stepsight.dataset.capture.capturing_run import CaptureRequest, capture
    from stepsight.dataset.tensors.program import is_model, read_model

    inference, dims, precision = model
    if is_model(script):
        if arguments:
            raise StepsightError(f"a model takes no arguments, got {' '.join(arguments)!r:.80}: options go before it")
        sizes = pairs("--dims", filter(None, map(str.strip, dims.split(","))), int)
        told: dict[str, Any] = {"training": not inference, "dims": sizes, "precision": precision}
        return lambda size: read_model(script, size, run["local_size"], **told)
    if inference or dims or precision:
        raise StepsightError("--inference, --dims and --precision are for models: an .onnx or a .pt2 file")
    chosen = comma_separated("--ranks", int, (), None if ranks == "auto" else ranks)
    asked = {**run, "ranks": tuple(dict.fromkeys(chosen))}
    return lambda size: capture(
        CaptureRequest(script, tuple(arguments), size, **asked), progress(f"ranks of {size} captured")
    )


def capture_command(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(metavar="SCRIPT")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS…")] = None,
    *,
    world_size: Annotated[str, typer.Option(metavar="VALUE,VALUE…")],
    out: Annotated[Path, "-o"],
    ranks: Annotated[str, "--ranks", "--rank"] = "auto",
    devices_per_node: int = 8,
    warm_up: int = 1,
    device: str = "cuda",
    timeout: float = 600.0,
    inference: bool = False,
    dims: str = "",
    precision: str = "",
    hardware: str = "",
    fabric: str = "",
    predictor: Annotated[Path | None, "-p"] = None,
) -> Answer:
    """Capture a training script as it would run on any number of GPUs; needs no GPU.

    The script runs unmodified on this machine, as one rank of the job. No other rank exists, tensors have shapes but no
    values, and collectives return at once. One training step is recorded: ops, collectives, streams and dependencies:

        stepsight capture --world-size 1024 --out captured examples/scripts/train_llama.py --tp 8
        stepsight predict --program captured --hardware h100-sxm-80gb --fabric dgx-h100

    Values of tensors are not known: a script that reads a value gets 1 or False. Tokens are spread evenly over experts.
    Regions of torch.compile are read as Inductor fuses them, for GPUs too.

    A model in a file (ONNX, or a file of torch.export.save) is read and not run. For training, the backward, AdamW and
    the all-reduce of gradients between --world-size replicas are derived from its forward:

        stepsight capture --world-size 16 --dims batch=8,seq=1024 --precision bf16 --out gpt2 gpt2.onnx

    Args:
        script: A training script, or a model: an .onnx or a .pt2 file.
        arguments: The script's arguments.
        world_size: Ranks of the job. Several numbers, for example 8,64,512, are captured into a folder each and
            compared in one table of time, memory and scaling on --hardware.
        out: Folder to write: new, or an earlier capture, which is replaced.
        ranks: Ranks to capture, as 0,8,16. auto: rank 0, every rank to which it sends messages, also through others
            (one of each pipeline stage), the last rank of each all-to-all group (experts), and the rank with
            the largest part, where parts differ.
        devices_per_node: Ranks on each node.
        warm_up: Training steps before the captured one.
        device: cuda, or cpu: the script then finds no GPU and runs CPU ops.
        timeout: Time limit for one rank, in seconds.
        inference: For a model: only the forward pass.
        dims: For a model: sizes of symbolic dimensions, as batch=8,seq=1024.
        precision: For a model: fp32, bf16 or fp16; replaces the floating-point type of the file.
        hardware: For several world sizes: name of the devices on which they are predicted.
        fabric: Of the same, a name or a file. Default: the usual one of the hardware.
        predictor: Of the same: folder of a trained predictor or name of a shipped one.
    """
    from stepsight.dataset.capture.captured import write_captured
    from stepsight.experiments.reports.run_texts import capture_text
    from stepsight.training.prediction.captured_prediction import captured_latency

    _refuse_unused(context, script, hardware)
    run = {"local_size": devices_per_node, "warm_up": warm_up, "device": device, "timeout_s": timeout}
    captured_at = _capturer(script, arguments or [], (inference, dims, precision), run, ranks)
    learned = load_predictor(predictor)
    if hardware:
        captured_latency(hardware, fabric, learned)  # a capture takes long
    captures = []
    for size, folder in _folders(world_size, hardware, out).items():
        captures.append(captured_at(size))
        write_captured(captures[-1], folder)
    if len(captures) > 1:
        return _scaling(captures, out, (hardware, fabric), learned)
    told = captures[0].to_dict() | {"out": str(out)}
    return Answer(told, capture_text(told))


def _refuse_unused(context: typer.Context, script: Path, hardware: str) -> None:
    """Refuse options that this capture does not use."""
    from stepsight.dataset.tensors.program import is_model

    if is_model(script):
        theirs = ("ranks", "warm_up", "device", "timeout")
        refuse_given(context, theirs, "is for scripts: a model is read, and not run. Leave it out")
    if not hardware:
        refuse_given(context, ("fabric", "predictor"), "is for several world sizes, which are compared on --hardware")


def _folders(world_size: str, hardware: str, out: Path) -> dict[int, Path]:
    """Where each world size is written."""
    from stepsight.dataset.base.files import check_writable
    from stepsight.dataset.capture.captured import check_capture_folder

    sizes: Sequence[int] = comma_separated("--world-size", int, (), world_size)
    if (len(sizes) > 1) != bool(hardware) or len(set(sizes)) < len(sizes):
        todo = "state different sizes and --hardware"
        if len(sizes) == 1:
            todo = f"capture one without --hardware, then `stepsight predict --program {out} --hardware {hardware}`"
        got = f"{world_size} and {hardware or 'none'}"
        raise StepsightError(f"several different world sizes are compared on --hardware, got {got}: {todo}")
    folders = {size: out / str(size) if len(sizes) > 1 else out for size in sizes}
    for folder in folders.values():
        check_capture_folder(folder)
        check_writable(folder)
    return folders


def _scaling(
    captures: list[Captured], out: Path, cluster: tuple[str, str], predictor: Predictor | str | None
) -> Answer:
    """Time, memory and scaling of captures of one script, beside the first one."""
    from stepsight.experiments.reports.text_table import Columns, table_of
    from stepsight.training.prediction.captured_prediction import predict_captured

    rows: list[dict[str, Any]] = []
    for captured in captures:
        found = predict_captured(captured, *cluster, predictor).to_dict()
        told = {key: found[key] for key in ("iteration_time_s", "low_s", "high_s", "warnings", "memory", "source")}
        scaling = 100 * (rows[0] if rows else told)["iteration_time_s"] / told["iteration_time_s"]
        rows.append({"world_size": captured.world_size, **told, "scaling_percent": scaling})
    columns: Columns = {
        "ranks": "world_size",
        "step ms": "iteration_time_s",
        "interval ms": lambda row: f"{1e3 * row['low_s']:.1f} to {1e3 * row['high_s']:.1f}",
        "memory GB": lambda row: f"{row['memory']['peak_bytes'] / 1e9:.1f}",
        "fits": lambda row: {True: "yes", False: "no", None: "-"}[row["memory"]["fits"]],
        "scaling %": "scaling_percent",
    }
    lines = [
        table_of(rows, columns),
        f"scaling: steps per second beside those of {rows[0]['world_size']} ranks; source {rows[0]['source']}",
        f"wrote {out}",
        *dict.fromkeys(f"warning: {text}" for row in rows for text in row["warnings"]),
    ]
    return Answer({"out": str(out), "captures": rows}, "\n".join(lines))


def emulate_command(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS…")] = None,
    *,
    world: Emulation,
    delays: str = "alpha-beta",
    fabric: str = "",
    predictor: Annotated[Path | None, "-p"] = None,
    extra_ms: Annotated[list[str] | None, typer.Option(metavar="WHAT=MS")] = None,
) -> Answer:
    """Run one or more ranks of your script; modelled delays replace all other ranks.

    Scripts with DDP, FSDP2, tensor parallelism and pipelines run unmodified. Each collective completes, in order, when
    its modelled delay has passed; the script computes meanwhile. Values from ranks that do not run are placeholders.
    Examples:

        stepsight emulate --world-size 256 --fabric dgx-h100 examples/scripts/train_llama.py --tp 8 --steps 20
        stepsight emulate --world-size 256 --ranks 0,8 --fabric dgx-h100 train.py --lr 0.1
        stepsight emulate --world-size 256 --delays my_delays.py --extra-ms all_reduce=5 --virtual train.py

    Args:
        script: Your training script, unmodified.
        arguments: Arguments of the script. Options of emulate must come before the script.
        delays: Model of the delays of collectives: `alpha-beta` (latency and bandwidth of --fabric), `predictor`, or
            your own Python file with a function seconds(kind, num_bytes, group_size, ranks_per_node). The file is run.
        fabric: Fabric of the world: a name or a file.
        predictor: With `--delays predictor`: a folder, or the name of a shipped predictor.
        extra_ms: Add MS milliseconds to collectives. WHAT is `all`, a kind (all_reduce), group:RANKS (groups of this
            size) or bytes:N (N bytes or more). Repeatable.
    """
    from stepsight.dataset.hardware.hardware import find_fabric
    from stepsight.experiments.tasks.scripts import delays_of, emulate, extra_delay
    from stepsight.training.tracking.tracking import load_predictor as load_named

    learned = load_named(predictor) if predictor is not None else None
    links = find_fabric(fabric) if fabric else None
    delay = delays_of(delays, links, learned, [extra_delay(text) for text in extra_ms or ()])
    found = emulate(script, arguments or [], world, delay)
    return Answer(found, found["text"])
