"""The catalogue of shipped predictors: names, hardware, and the recipe of each from public tables.

``python -m stepsight.training.shipped.catalogue a100-sxm --data DATA --out DIR`` makes one again, bit for bit with the
same versions of the libraries.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from stepsight.dataset.base.caching import cached
from stepsight.dataset.base.errors import PredictorError, StepsightError
from stepsight.dataset.base.files import digest
from stepsight.dataset.hardware.hardware import Hardware, find_hardware
from stepsight.dataset.kinds.op import COLLECTIVE_KINDS, OP_KINDS
from stepsight.training.corrections.residual import published_runs
from stepsight.training.kernels.kernel_models import Ratio, label, same_chip
from stepsight.training.predictor.model_tables import read_predictor_manifest
from stepsight.training.predictor.predictor import SHIPPED, Predictor, shipped_names
from stepsight.training.regression.trees import VERY_MANY_ROWS
from stepsight.training.shipped.product_power import product_power_w, tabled_power_w

if TYPE_CHECKING:
    from stepsight.dataset.tables import Measurements
    from stepsight.training.shipped.from_tables import CollectiveRows, OpRows

# Products by inference engines' kernels where training runs the same ones.  Their kernels for experts are others: on
# A100 they take half as long again as Transformer Engine's, whose ratio to plain products is measured elsewhere.
PRODUCTS = ("gemm", "attention")
STREAMING = ("norm", "elementwise")
FEWER_ROWS = VERY_MANY_ROWS - 1  # fewer trees than from more rows: a third of the size
__all__ = ["RECIPES", "Recipe", "TableSource", "read_recipe", "retrain", "shipped_names", "shipped_predictor"]


@dataclass(frozen=True)
class TableSource:
    """A part of the public data."""

    format: str  # of dataset.tables.FORMATS
    path: str  # within the folder of all data
    families: tuple[str, ...] = ()  # of ops that are taken from it; empty: all


@dataclass(frozen=True)
class Recipe:
    """A recipe of a shipped predictor."""

    chip: str  # what the hardware and its twins share
    hardware: str  # preset of what was measured
    twins: tuple[str, ...]  # presets with the same chip, served too: ops take as much longer as their roofline says
    own: tuple[TableSource, ...]  # measurements of the hardware
    others: tuple[TableSource, ...]  # measurements of other devices, for kinds that own lacks
    # patterns of what ran them and of its precision (TRTLLM 1.0 fp8): first what training runs most alike, then what
    # only lends its shapes
    software: tuple[str, ...]
    # names of the groups of software, by label of ops, for jobs that ask for one
    kernels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # measurements of collectives; between nodes those of other devices count too, relative to their links
    collectives: tuple[TableSource, ...] = ()
    stated: Mapping[str, Ratio] = field(default_factory=dict)  # ratios of kinds that are in no table, from papers
    # measurements of devices with the same chip, by preset, of what own lacks: ops count as much longer or shorter as
    # rooflines say, and collectives within a node as they are
    lent: Mapping[str, tuple[TableSource, ...]] = field(default_factory=dict)
    teaches: bool = True  # whether its efficiencies help to predict other devices: training's kernels in 16 bits
    most_rows: int = 0  # most rows of a family that are fitted, drawn at random, for a small predictor; 0: all


# Geometric means of what papers say of one generation of attention kernels against the next.
_FIRST = Ratio(0.59, "FlashAttention-2 (Dao 2023), section 4.1: 1.3 to 2.5 times as fast as the first one in Triton")
_SECOND = "FlashAttention-3 (Shah et al. 2024), abstract and section 4.1"
_FLASH_1 = {"flash1_attention": _FIRST, "flash1_attention_backward": _FIRST}
_FLASH_2 = {
    "flash2_attention": Ratio(0.55, f"{_SECOND}: 1.5 to 2.0 times as fast as the second one"),
    "flash2_attention_backward": Ratio(0.48, f"{_SECOND}: 1.5 to 1.75 times as fast as the second one"),
}
_SAME = Ratio(0.0, "the second generation is the last one for this device, and what was measured")
_FLASH_2_LAST = {"flash2_attention": _SAME, "flash2_attention_backward": _SAME}

# Fabrics of tables, and the presets whose links they are.  ``cluster01`` reaches 48.9 GB/s per adapter.  Left out are
# networks of which nobody knows the links (Vidur's between nodes, ``cluster00``).
_LINKS = MappingProxyType(
    {name: name for name in ("dgx-a100", "dgx-h100", "dgx-b200", "pcie-gen4")}
    | {"nccl-tests-example-cluster01": "dgx-h100"}
)
_NCCL = r"nccl-tests|nccl .*half$|^nccl$"  # not in 8 bits, where switches do not sum


def _engines(path: str, *families: str) -> TableSource:
    """Benchmarks of inference engines."""
    return TableSource("aiconfigurator", f"kernels/aiconfigurator/data/{path}", families)


def _vidur(device: str) -> TableSource:
    return TableSource("vidur", f"kernels/vidur/compute/{device}", STREAMING)


def _sends(device: str) -> TableSource:
    return TableSource("vidur", f"collectives/vidur/network/{device}_dgx/send_recv.csv.gz")


def _simumax(file: str = "") -> TableSource:
    return TableSource("simumax", f"kernels/simumax/configs/system{file}")


_NEUSIGHT = TableSource("neusight", "kernels/neusight/train")


def _of_neusight(chip: str, hardware: str, *twins: str) -> Recipe:
    """Of a device that NeuSight measured."""
    others = (_simumax("/a100_pcie.json"),)
    return Recipe(chip, hardware, twins, (_NEUSIGHT,), others, ("torch",), teaches=False, most_rows=FEWER_ROWS)


_NCCL_TESTS = TableSource("nccl-tests", "collectives/nccl-tests-cluster")
_SCALED_FP8 = ("TensorRT-LLM (cuBLAS, one scale)", "SGLang (CUTLASS, a scale for each row)")

RECIPES = MappingProxyType(
    {
        "a100-sxm": Recipe(
            "A100",
            "a100-sxm-80gb",
            ("a100-sxm-40gb",),
            (_engines("a100_sxm", *PRODUCTS), _vidur("a100")),
            (_simumax("/a100_pcie.json"),),
            ("SGLang|vidur", "TRTLLM"),
            {"gemm": ("SGLang (torch)", "TensorRT-LLM"), "attention": ("SGLang", "TensorRT-LLM")},
            (
                _engines("a100_sxm"),
                TableSource("vtrain", "collectives/vtrain/trace/a100"),
                _sends("a100"),
                _NCCL_TESTS,
            ),
            {**_FLASH_1, **_FLASH_2_LAST},
        ),
        # FlashAttention-3 and cuDNN's attention are alike; Triton's is not what training runs.
        "h100-sxm": Recipe(
            "H100",
            "h100-sxm-80gb",
            ("h100-sxm-96gb",),
            (_engines("h100_sxm", *PRODUCTS), _vidur("h100")),
            (_simumax(),),
            # In 8 bits TensorRT-LLM calls cuBLAS with one scale for a tensor, as Transformer Engine and PyTorch do.
            (
                r"SGLang .* (fa3|flash_attention_v3|sglang_torch_linear) bf16|TRTLLM .* torch_flow fp8$|vidur",
                r"TRTLLM .* torch_flow bf16|sglang_sgl_kernel_fp8_scaled_mm|SGLang .* fa3 fp8",
                "deepgemm",
                r"TRTLLM .* fp8_block fp8$",
            ),
            {
                "gemm": ("SGLang (torch)", "TensorRT-LLM"),
                "gemm/fp8": (
                    *_SCALED_FP8,
                    "DeepGEMM (a scale for each block)",
                    "TensorRT-LLM (a scale for each block)",
                ),
                "attention": ("SGLang (FlashAttention-3)", "TensorRT-LLM"),
                "attention/fp8": ("TensorRT-LLM", "SGLang (FlashAttention-3)"),
            },
            (_engines("h100_sxm"), _sends("h100"), _NCCL_TESTS),
            {**_FLASH_1, **_FLASH_2},
        ),
        # H100's chip with faster memory: of products that both ran (aiconfigurator, SGLang 0.5.14) those that stream
        # take 0.71 of H100's time and those that compute 1.02, as rooflines say.  Nobody measured on it what streams,
        # attention without a mask or cuBLAS in 8 bits; of the 8-bit kernels that were, the faster takes a tenth longer.
        # A fifth of its long products take a fifth longer than their like, as if one device had been slow; what is
        # fitted are medians.
        "h200-sxm": Recipe(
            "H100",
            "h200-sxm-141gb",
            (),
            (_engines("h200_sxm", *PRODUCTS),),
            (_simumax(),),
            (
                r"SGLang .* (fa3|flash_attention_v3|sglang_torch_linear) |TRTLLM .* torch_flow fp8$|vidur",
                "sglang_sgl_kernel_fp8_scaled_mm",
            ),
            {"gemm/fp8": _SCALED_FP8},
            (_engines("h200_sxm"), _sends("h100"), _NCCL_TESTS),
            {**_FLASH_1, **_FLASH_2},
            {
                "h100-sxm-80gb": (
                    _engines("h100_sxm/encoder_attention", "attention"),
                    _engines("h100_sxm/gemm/trtllm", "gemm"),
                    _vidur("h100"),
                )
            },
        ),
        # Products of training itself (Transformer Engine, fp32 sums of gradients) before those of inference engines.
        # Blackwell Ultra (B300) has Blackwell's dense peaks in 8 and 16 bits and its memory's bandwidth.
        # In 8 bits DeepGEMM runs the instructions with scales of blocks that cuBLAS runs for MXFP8.
        "b200-sxm": Recipe(
            "B200",
            "b200-sxm-180gb",
            ("gb200-sxm-186gb", "b300-sxm-270gb", "gb300-sxm-279gb"),
            (_engines("b200_sxm", *PRODUCTS), _simumax("/b200_bf16_ceperm.json.gz")),
            (_simumax("/a100_pcie.json"),),
            ("simumax|deepgemm", r"SGLang .* (sglang_torch_linear|sglang_sgl_kernel_fp8_scaled_mm)"),
            {
                "gemm": ("Transformer Engine (SimuMax)", "SGLang (torch)"),
                "gemm/fp8": ("DeepGEMM", "SGLang (CUTLASS, a scale for each row)"),
            },
            (_engines("b200_sxm"), _NCCL_TESTS),
            {**_FLASH_1, **_FLASH_2},
        ),
        # NeuSight's tables are PyTorch in fp32, with convolutions.
        "a100-pcie": Recipe(
            "A100",
            "a100-pcie-40gb",
            ("a100-pcie-80gb",),
            (replace(_NEUSIGHT, families=("gemm", "batched_gemm", "softmax")),),
            (_simumax("/a100_pcie.json"),),
            ("SGLang|vidur|torch", "TRTLLM"),
            {"gemm": ("SGLang (torch)", "TensorRT-LLM"), "attention": ("SGLang", "TensorRT-LLM")},
            (),
            {**_FLASH_1, **_FLASH_2_LAST},
            {"a100-sxm-80gb": (_engines("a100_sxm", *PRODUCTS), _vidur("a100"))},
            teaches=False,
            most_rows=FEWER_ROWS,
        ),
        "v100-pcie": _of_neusight("V100", "v100-pcie-32gb", "v100-sxm-32gb"),
        "t4-pcie": _of_neusight("T4", "t4-pcie-16gb"),
        "p100-pcie": _of_neusight("P100", "p100-pcie-16gb"),
        "l40s-pcie": Recipe(
            "L40S",
            "l40s-pcie-48gb",
            (),
            (_engines("l40s", "gemm"),),
            (_simumax("/a100_pcie.json"),),
            ("SGLang",),
            {},
            (_engines("l40s"),),
            teaches=False,
            most_rows=FEWER_ROWS,
        ),
        "a40-pcie": Recipe(
            "A40",
            "a40-pcie-48gb",
            (),
            (TableSource("vidur", "kernels/vidur/compute/a40"),),
            (_simumax("/a100_pcie.json"),),
            ("vidur",),
            teaches=False,
        ),
    }
)


def teaching_names() -> tuple[str, ...]:
    """Names of the shipped predictors whose efficiencies teach other devices."""
    return tuple(name for name in shipped_names() if RECIPES[name].teaches)


def chip_of(hardware: str) -> str:
    """The chip of a hardware that a shipped predictor covers; empty if none does."""
    found = (recipe.chip for recipe in RECIPES.values() if hardware in (recipe.hardware, *recipe.twins))
    return next(found, "")


@cached(64)
def shipped_predictor(name: str) -> Predictor | None:
    """The predictor of that name, or for that hardware; None if there is none."""
    for own, recipe in RECIPES.items():
        if name in (own, recipe.hardware, *recipe.twins) and own in shipped_names():
            predictor = Predictor.load(SHIPPED / own)
            hardware = _preset(recipe.hardware if name == own else name)  # current facts of the preset
            measured = predictor.kernel.hardware
            facts = _preset(recipe.hardware)
            peaks = {**facts.peak_flops, **measured.peak_flops}  # of types that nobody measured, too
            measured = replace(measured, peak_flops=peaks, power_w=facts.power_w, idle_w=facts.idle_w)
            measured = replace(measured, exponentials_per_s=facts.exponentials_per_s)
            measured = replace(measured, product_power_w=tabled_power_w(recipe.chip, facts))
            hardware = replace(hardware, product_power_w=product_power_w(recipe.chip))
            serves = same_chip(hardware, measured) if hardware.name in recipe.twins else None
            kernel = replace(predictor.kernel, hardware=measured, serves=serves, software=recipe.kernels)
            shipped = replace(predictor, hardware=hardware, kernel=kernel)
            near = published_runs().on((recipe.hardware, *recipe.twins))
            return shipped.with_published(near if near.runs else None)
    return None


@cached(256)
def shipped_without(name: str, source: str) -> Predictor | None:
    """The shipped predictor of a name without what it learned from one source of published runs."""
    whole = shipped_predictor(name)
    published = None if whole is None else whole.calibration.published
    if whole is None or published is None:
        return whole
    powers = product_power_w(chip_of(whole.hardware.name), source)
    if powers != whole.hardware.product_power_w:
        whole = replace(whole, hardware=replace(whole.hardware, product_power_w=powers))
    left = published.without(source)
    return whole if left is published else whole.with_published(left)


@cached(1)
def facts_digest() -> str:
    """Digest of what a prediction of a published run follows from as data: presets and shipped predictors."""
    folders = (
        resources.files("stepsight.dataset").joinpath("presets"),
        resources.files("stepsight.training").joinpath("shipped"),
    )
    files = [file for folder in folders for file in folder.iterdir() if file.name.endswith((".toml", ".csv", ".json"))]
    texts = [file.read_text("utf-8") for file in sorted(files, key=lambda file: file.name)]
    return digest(*texts, *(str(read_predictor_manifest(SHIPPED / name)["digest"]) for name in shipped_names()))


def read_recipe(recipe: Recipe, data: Path) -> tuple[OpRows, dict[str, Measurements]]:
    """Distinct ops of a recipe: rows of its hardware that are its ``own``, ``lent`` to it, and of ``others``."""
    from stepsight.dataset.tables import Measurements
    from stepsight.training.shipped.from_tables import in_known_precisions, lend, op_table, products_alone, sample

    hardware = _preset(recipe.hardware)
    own = in_known_precisions(Measurements.concat(_read(source, data) for source in recipe.own), hardware)
    own = products_alone(own, hardware)
    lent = Measurements.concat(
        lend(products_alone(_read(source, data), _preset(lender)), _preset(lender), hardware)
        for lender, sources in recipe.lent.items()
        for source in sources
    )
    others = in_known_precisions(Measurements.concat(_read(source, data) for source in recipe.others), hardware)
    rows = op_table(Measurements.concat((own, lent)), recipe.hardware, recipe.software)
    if recipe.most_rows:
        rows = rows.take(sample([label(op.family, op, hardware) for op in rows.ops], recipe.most_rows))
    return rows, {"own": own, "lent": lent, "others": others}


def read_links(recipe: Recipe, data: Path) -> tuple[CollectiveRows, Measurements]:
    """Distinct collectives of a recipe, and their rows."""
    from stepsight.dataset.tables import Measurements, read_table
    from stepsight.training.shipped.from_tables import collective_table

    table = Measurements.concat(
        read_table(source.format, data / source.path).where(kind=list(COLLECTIVE_KINDS))
        for source in recipe.collectives
    )
    return collective_table(table, recipe.hardware, tuple(recipe.lent), _LINKS, _NCCL), table


def _preset(name: str) -> Hardware:
    hardware = find_hardware(name)
    assert hardware is not None, name
    return hardware


def _read(source: TableSource, data: Path) -> Measurements:
    from stepsight.dataset.tables import read_table

    table = read_table(source.format, data / source.path)
    kinds = [kind.name for kind in OP_KINDS.values() if not source.families or kind.family in source.families]
    return table.where(kind=kinds)


def retrain(name: str, data: Path, out: Path, seed: int = 0) -> Predictor:
    """Make a shipped predictor again, and write it.

    Args:
        name: Of a recipe.
        data: Folder of the public data; ``Recipe`` says what must be there.
        out: Folder of the predictor to write.
        seed: Of everything random; 0 made what is shipped.

    Raises:
        PredictorError: If there is no such recipe, or ``out`` is something else.
        TableError: If a source is not there or malformed.
    """
    from stepsight.training.shipped.from_tables import fit_links, fit_table

    recipe = RECIPES.get(name)
    if recipe is None:
        raise PredictorError(f"a shipped predictor must be one of {', '.join(RECIPES)}, got {name!r:.80}")
    hardware = _preset(recipe.hardware)
    rows, tables = read_recipe(recipe, data)
    kernel = fit_table(rows, hardware, tables["others"], seed=seed)
    kernel = replace(kernel, ratios={**kernel.ratios, **recipe.stated})
    links, measured = read_links(recipe, data)
    collective = fit_links(links, seed=seed)
    all_files = {**tables["own"].files, **tables["lent"].files, **tables["others"].files, **measured.files}
    files = {source: {"digest": f.digest, "licence": f.licence} for source, f in all_files.items()}
    metrics = {
        f"alone_error_{family.replace('/', '_')}_percent": round(100 * float(np.expm1(error)), 3)
        for family, error in {**kernel.regressor.errors, **collective.errors}.items()
    }
    lent = {
        "devices": list(recipe.lent),
        "kinds": _kinds(tables["lent"], recipe, hardware),
        "sources": list(tables["lent"].files),
        "how": "times of devices with the same chip, as much longer or shorter as rooflines say",
    }
    # Tables of several devices make several predictors.  Teachers have tables of their own, and saved predictors name
    # them by their digests.
    device = () if recipe.teaches else (hardware.name,)
    manifest: dict[str, Any] = {
        "name": name,
        "digest": digest(*device, *(file["digest"] for file in files.values()), str(seed), version("stepsight")),
        "sources": files,
        "num_ops": len(rows),
        "num_collectives": len(links),
        "kinds_measured": _kinds(tables["own"], recipe, hardware),
        **({"lent": lent} if recipe.lent else {}),
        "collectives_measured": list(collective.labels),
        "kinds_by_ratio": {kind: ratio.to_dict() for kind, ratio in kernel.ratios.items()},
        "fitted_rows": [],
        "versions": {package: version(package) for package in ("stepsight", "lightgbm", "numpy")},
        "seed": seed,
        "metrics": metrics,
    }
    predictor = Predictor(hardware, kernel, collective, manifest=manifest)
    predictor.save(out)
    return predictor


def _kinds(table: Measurements, recipe: Recipe, hardware: Hardware) -> list[str]:
    """The kinds in a table, with the precision if it has its own kernels."""
    from stepsight.training.shipped.from_tables import op_table

    rows = op_table(table, recipe.hardware, recipe.software)
    return sorted({label(op.kind, op, hardware) for op in rows.ops})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stepsight.training.shipped.catalogue", description=__doc__)
    parser.add_argument("name", choices=list(RECIPES))
    parser.add_argument("--data", type=Path, required=True, help="folder of the public tables")
    parser.add_argument("--out", type=Path, required=True, help="folder of the predictor to write")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    try:
        predictor = retrain(args.name, args.data, args.out, args.seed)
    except StepsightError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for metric, value in predictor.manifest["metrics"].items():
        print(f"{metric} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
