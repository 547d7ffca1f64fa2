"""Scripts of frameworks, unmodified, captured at 64 ranks; each is left out where its framework is not installed."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from stepsight.dataset.capture.captured import Captured, compute_flops
from stepsight.dataset.capture.capturing_run import CaptureRequest, capture
from stepsight.dataset.kinds.op import Collective

SCRIPTS = Path(__file__).parents[2] / "examples" / "scripts"
WORLD = 64


def _captured(script: str, *arguments: str, needs: tuple[str, ...]) -> Captured:
    for module in needs:
        try:
            importlib.import_module(module)
        except (ImportError, RuntimeError) as error:  # a torchvision of another build of PyTorch raises
            pytest.skip(f"{script} needs {module}: {error}")
    return capture(CaptureRequest(SCRIPTS / script, arguments, WORLD))


def _reduced(captured: Captured) -> int:
    """Bytes of gradients that all ranks sum."""
    graph = captured.ranks[0].graph
    works = [graph.works[work] for work in graph.columns["work"].tolist() if work >= 0]
    return sum(work.num_bytes for work in works if isinstance(work, Collective) and work.kind == "all_reduce")


@pytest.mark.parametrize("model", ["gpt2", "mixtral"])
def test_a_transformer_under_its_trainer(model: str) -> None:
    """DDP sums every gradient once; products of experts are found."""
    captured = _captured("transformers_trainer.py", model, needs=("transformers", "accelerate"))
    graph = captured.ranks[0].graph
    kinds = {work.kind for work in graph.works}
    assert _reduced(captured) > 4e6
    assert compute_flops(graph) > 1e9
    assert "adamw" in kinds
    assert ("grouped_linear_wgrad" in kinds) == (model == "mixtral")


def test_accelerate_sums_gradients_once_in_two_parts() -> None:
    """Gradients are accumulated: of two parts of a step, one communicates."""
    captured = _captured("accelerate_train.py", needs=("transformers", "accelerate"))
    graph = captured.ranks[0].graph
    losses = sum(graph.works[work].kind == "cross_entropy" for work in graph.columns["work"].tolist() if work >= 0)
    assert losses == 2
    assert 7e6 < _reduced(captured) < 9e6  # 1.9 million parameters


def test_llama_of_torchtitan_with_fsdp_and_tensor_parallelism() -> None:
    """Each of 6 layers and the root are gathered and scattered over 32 ranks, and work on two ranks of each node."""
    needs = ("torchtitan.models.llama3",)
    captured = _captured("torchtitan_llama.py", "--tp", "2", "--seq-len", "64", needs=needs)
    graph = captured.ranks[0].graph
    works = [graph.works[work] for work in graph.columns["work"].tolist() if work >= 0]
    groups = {(work.kind, work.group_size) for work in works if isinstance(work, Collective)}
    assert groups >= {(kind, size) for kind in ("all_gather", "reduce_scatter") for size in (2, 32)}
    assert sum(work.kind == "attention_backward" for work in works) == 6


@pytest.mark.parametrize(
    ("script", "module"), [("diffusers_unet.py", "diffusers"), ("torchvision_ddp.py", "torchvision")]
)
def test_an_image_model_under_ddp(script: str, module: str) -> None:
    captured = _captured(script, needs=(module,))
    kinds = {work.kind for work in captured.ranks[0].graph.works}
    assert {"conv", "conv_backward", "all_reduce"} <= kinds
