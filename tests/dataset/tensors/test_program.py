"""Transformed programs compute what the model computes: forward, gradients and the optimizer's step."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepsight
from stepsight.dataset.base.errors import CaptureError, PredictorError
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.tensors.program import TensorProgram

BATCH, LENGTH, VOCAB, HIDDEN, HEADS = 8, 6, 32, 16, 4
Plan = Callable[[TensorProgram], TensorProgram]
PLANS: dict[str, Plan] = {
    "D": lambda program: program.replicate(2),
    "T": lambda program: program.split(2),
    "P": lambda program: program.cut(2, micro_batches=2),
    "DT": lambda program: program.replicate(2).split(2),
    "DTP": lambda program: program.replicate(2).split(2).cut(2, micro_batches=2),
    "PTD": lambda program: program.cut(2, micro_batches=2).split(2).replicate(2),
    "TPD": lambda program: program.split(2).cut(2).replicate(2),
    "four, and four": lambda program: program.split(4).replicate(4),
    "micro-batches": lambda program: program.micro_batches(4).replicate(2),
}
MODELS = ("mlp.onnx", "gpt.onnx", "llama.pt2")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLP and a GPT-2 by torch.onnx, and a Llama by torch.export."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnx")
    folder, (mlp, gpt, llama) = tmp_path_factory.mktemp("models"), models(torch)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(mlp, (torch.randn(BATCH, HIDDEN),), folder / "mlp.onnx", dynamo=False)
        torch.onnx.export(gpt, (tokens,), folder / "gpt.onnx", dynamo=False)
    torch.export.save(torch.export.export(llama, (tokens,)), folder / "llama.pt2")
    return folder


def models(torch: Any) -> tuple[Any, Any, Any]:
    nn, attend = torch.nn, torch.nn.functional.scaled_dot_product_attention

    class Block(nn.Module):  # type: ignore[name-defined,misc]
        def __init__(self, gated: bool) -> None:
            super().__init__()
            norm, groups = (nn.RMSNorm, HEADS // 2) if gated else (nn.LayerNorm, HEADS)
            self.gated, self.sizes = gated, (HIDDEN, *(groups * HIDDEN // HEADS,) * 2)
            self.one, self.two = norm(HIDDEN, eps=1e-5), norm(HIDDEN, eps=1e-5)
            if gated:
                self.q, self.k, self.v = (nn.Linear(HIDDEN, size, bias=False) for size in self.sizes)
                self.gate = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)
            else:
                self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
            self.out = nn.Linear(HIDDEN, HIDDEN, bias=not gated)
            self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN, bias=not gated), nn.Linear(2 * HIDDEN, HIDDEN)

        def forward(self, x: Any) -> Any:
            batch, length, _ = x.shape
            y = self.one(x)
            parts = [self.q(y), self.k(y), self.v(y)] if self.gated else self.qkv(y).split(HIDDEN, dim=2)
            q, k, v = (part.view(batch, length, -1, HIDDEN // HEADS).transpose(1, 2) for part in parts)
            more = {"enable_gqa": True} if self.gated else {}
            x = x + self.out(attend(q, k, v, is_causal=True, **more).transpose(1, 2).reshape(x.shape))
            y = self.two(x)
            act = nn.functional.silu(self.gate(y)) * self.up(y) if self.gated else nn.functional.gelu(self.up(y))
            return x + self.down(act)

    class Model(nn.Module):  # type: ignore[name-defined,misc]
        def __init__(self, gated: bool) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
            self.blocks = nn.ModuleList(Block(gated) for _ in range(2))
            self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
            if gated:
                self.head.weight = self.tokens.weight

        def forward(self, tokens: Any) -> Any:
            x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    layers = [nn.Linear(HIDDEN, 4 * HIDDEN), nn.ReLU(), nn.Linear(4 * HIDDEN, HIDDEN), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(HIDDEN, HIDDEN)).eval(), Model(False).eval(), Model(True).eval()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_transformed_programs_compute_the_same(name: str, training: bool, files: Path) -> None:
    program = TensorProgram.load(files / name, training=training)
    values = program.random_values()
    expected = program.run(values)
    assert training == any(each.startswith("new ") for each in expected)
    for plan, transform in PLANS.items():
        changed = transform(program)
        found = changed.run(values)
        assert found.keys() == expected.keys() and changed.world_size > 1, plan
        for output, value in expected.items():
            assert np.allclose(found[output], value, rtol=1e-5, atol=1e-5 * np.abs(value).max()), (plan, output)


@pytest.mark.parametrize("name", MODELS)
def test_the_program_computes_what_torch_does(name: str, files: Path) -> None:
    """The forward of a file, and gradients by autograd."""
    torch = pytest.importorskip("torch")
    program = TensorProgram.load(files / name, training=True)
    values = program.random_values()
    (output,) = [each for each in program.outputs if each not in program.shapes or "gradient" not in each][:1]
    found = program.run(values)
    if name.endswith(".onnx"):
        onnx = pytest.importorskip("onnx")
        from onnx.reference import ReferenceEvaluator

        model = onnx.load(files / name)
        for tensor in model.graph.initializer:
            if tensor.name in values:
                tensor.CopyFrom(onnx.numpy_helper.from_array(values[tensor.name].astype(np.float32), tensor.name))
        kinds = {each.name: each.type.tensor_type.elem_type for each in model.graph.input}
        feeds = {each: values[each].astype(np.float32 if kinds[each] == 1 else np.int64) for each in kinds}
        assert np.allclose(ReferenceEvaluator(model).run(None, feeds)[0], found[output], rtol=2e-4, atol=2e-4)
        return
    exported = torch.export.load(files / name)
    module, names = exported.module().double(), exported.graph_signature.inputs_to_parameters
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for each, of in names.items():
        if each in values:
            parameters[of].data = torch.tensor(values[each])
    made = module(torch.tensor(values[program.inputs[0]], dtype=torch.long))
    made.backward(torch.tensor(values[f"gradient of {output}"]))
    assert np.allclose(made.detach(), found[output], atol=1e-9)
    for each, of in names.items():
        if each in values:
            assert np.allclose(parameters[of].grad, found[f"gradient of {each}"], atol=1e-9), each


def collectives(program: TensorProgram) -> Counter[str]:
    found = [node.work.kind for rank in program.captured().ranks for node in rank.graph.nodes]
    return Counter(kind for kind in found if kind in ("all_reduce", "all_gather", "send_recv"))


def test_tensor_parallel_blocks_have_megatrons_collectives(files: Path) -> None:
    """Two all-reduces in the forward of a block, two in its backward, and one for the head's columns."""
    program = TensorProgram.load(files / "gpt.onnx")
    assert collectives(program.split(2)) == {"all_reduce": 4}
    assert collectives(program.with_training().split(2)) == {"all_reduce": 9}
    assert not collectives(program.replicate(2))
    assert collectives(program.cut(2)) == {"send_recv": 2}


def test_ranks_become_programs_with_their_part_of_the_work(files: Path) -> None:
    """Work and parameters of a rank are a half; replicas reduce all gradients; stages meet by messages."""
    program = TensorProgram.load(files / "gpt.onnx", training=True, precision="bf16")
    whole = work_of(program)
    assert work_of(program.replicate(2)) == pytest.approx(whole / 2)
    assert work_of(program.split(2)) == pytest.approx(whole / 2, rel=0.01)
    numel = sum(int(np.prod(program.shapes[name])) for name in program.parameters)
    (rank,) = program.replicate(2).captured().ranks
    sums = [node.work for node in rank.graph.nodes if isinstance(node.work, Collective)]
    assert sum(each.num_bytes for each in sums) == 2 * numel and {each.group_size for each in sums} == {2}
    captured = program.cut(2, micro_batches=4).captured(devices_per_node=1)
    assert [rank.rank for rank in captured.ranks] == [0, 1] and captured.world_size == 2
    kinds = [Counter(n.work.kind for n in rank.graph.nodes) for rank in captured.ranks]
    assert kinds[0]["send_recv"] == kinds[1]["send_recv"] and all(kind["adamw"] == 1 for kind in kinds)
    assert all(rank.peak_bytes > 0 for rank in captured.ranks)


def test_what_was_never_on_a_device_names_none(files: Path) -> None:
    (rank,) = TensorProgram.load(files / "mlp.onnx").captured().ranks
    with pytest.raises(PredictorError, match="names no device: set its device_name"):
        stepsight.predict(rank.graph)
    assert stepsight.predict(rank.graph.replace(device_name="h100-sxm-80gb")).iteration_time_s > 0


def work_of(program: TensorProgram) -> float:
    (rank,) = program.captured().ranks
    return sum(node.work.flops for node in rank.graph.nodes if isinstance(node.work, Op) and "linear" in node.work.kind)


def test_what_cannot_be_transformed_is_refused(files: Path) -> None:
    program = TensorProgram.load(files / "mlp.onnx")
    for wrong in (
        lambda: program.replicate(3),
        lambda: program.micro_batches(2).micro_batches(2),
        lambda: program.cut(2).cut(2),
        lambda: program.cut(40),
        lambda: program.replicate(2).with_training(),
        lambda: program.run({}),
        lambda: TensorProgram.load(files / "mlp.txt"),
    ):
        with pytest.raises(CaptureError, match=r"must|each have"):
            wrong()


def test_sizes_and_counts_are_whole_numbers_of_what_the_model_has(files: Path) -> None:
    with pytest.raises(CaptureError, match=r"must have the dimension 'bat'; it has none"):
        TensorProgram.load(files / "mlp.onnx", {"bat": 8})
    with pytest.raises(CaptureError, match=r"must have the dimension 'bat'"):
        TensorProgram.load(files / "llama.pt2", {"bat": 8})
    program = TensorProgram.load(files / "mlp.onnx")
    for wrong in (0, -1, 1.5, "2", True, None):
        for change in (program.replicate, program.split, program.micro_batches, program.cut, program.captured):
            with pytest.raises(CaptureError, match="must be a whole number of at least 1"):
                change(wrong)  # type: ignore[operator]


def test_values_that_do_not_fit_are_refused(files: Path) -> None:
    """Whole values of a transformed program are asked for, and each refusal is one line."""
    program = TensorProgram.load(files / "llama.pt2").replicate(2).split(2)
    good = program.random_values() | TensorProgram.load(files / "llama.pt2").random_values()
    tokens, weight = program.inputs[0], program.parameters[1]
    wrong: dict[str, tuple[object, str]] = {
        "shape": ({**good, tokens: good[tokens][:-1]}, r"must be numbers of shape \(8, 6\), got .*\(7, 6\)"),
        "words": ({**good, tokens: np.full((BATCH, LENGTH), "a")}, "must be numbers of shape"),
        "rows": ({**good, weight: [[1.0], [1.0, 2.0]]}, "must be numbers of shape"),
        "nothing": ({**good, weight: None}, "must be numbers of shape"),
        "NaN": ({**good, weight: np.full_like(good[weight], np.nan)}, "got NaN in it"),
        "complex": ({**good, weight: good[weight] * 1j}, "must be numbers of shape .*complex"),
        "missing": ({name: value for name, value in good.items() if name != weight}, "got none of"),
        "a list": ([1.0], "by name, got none of"),
        "tokens": ({**good, tokens: np.full((BATCH, LENGTH), 10.0 * VOCAB)}, "embedding.*must be whole and fit"),
    }
    for what, (values, rule) in wrong.items():
        with pytest.raises(CaptureError, match=rule) as error:
            program.run(values)  # type: ignore[arg-type]
        assert "\n" not in str(error.value), what
    assert np.isfinite(program.run(good)[next(iter(program.outputs))]).all()


def test_a_file_whose_shapes_contradict_its_ops_is_refused(files: Path) -> None:
    program = TensorProgram.load(files / "mlp.onnx")
    call = program.calls[0]
    wrong = replace(program, shapes={**program.shapes, call.writes[0]: (1, 1)})
    with pytest.raises(CaptureError, match="must be whole and fit"):
        wrong.run(program.random_values())
