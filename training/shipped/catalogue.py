"""The catalogue of shipped predictors: names, hardware, and the recipe of each from public tables.

``python -m stepsight.training.shipped.catalogue a100-sxm --data DATA --out DIR`` makes one again, bit for bit with the
same versions of the libraries.

Kernels of tables were measured alone, in calls that end before the power limit lowers the clock.  In training the clock
falls (``Hardware.power_slowdown``), by as much as the chip's products would draw more than the limit of the device.
That power is one number for each chip, for products in 16 bits and in fewer.  It is learned from published runs of
dense models with fused attention, whose software runs the kernels of the tables, without the runs that are judged.  The
prior is what the chip's table shows (``TABLED``): a benchmark repeats a kernel, so that the clock falls beside long
ones.  ``python tools/shipped_data.py power RUNS`` writes the preset again.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from stepsight.dataset.base.bounded import read_toml
from stepsight.dataset.base.caching import cached
from stepsight.dataset.base.errors import PredictorError, StepsightError
from stepsight.dataset.base.files import OPTIONAL, Saved, digest, read_json
from stepsight.dataset.hardware.hardware import Hardware, find_hardware
from stepsight.dataset.kinds.op import COLLECTIVE_KINDS, OP_KINDS
from stepsight.training.corrections.residual import published_runs
from stepsight.training.kernels.kernel_models import Ratio, label, same_chip
from stepsight.training.predictor.model_tables import read_predictor_manifest
from stepsight.training.predictor.predictor import SHIPPED, Predictor, shipped_names

if TYPE_CHECKING:
    from stepsight.dataset.tables import Measurements
    from stepsight.training.shipped.from_tables import CollectiveRows, OpRows


__all__ = ["RECIPES", "Recipe", "TableSource", "read_recipe", "retrain", "shipped_names", "shipped_predictor"]


@dataclass(frozen=True)
class TableSource(Saved):
    """A part of the public data; see ``predictors/recipes.toml``."""

    format: str
    path: str
    families: tuple[str, ...] = field(default=(), metadata=OPTIONAL)


Sources = tuple[TableSource, ...]


@dataclass(frozen=True)
class Recipe(Saved):
    """A recipe of a shipped predictor; see ``predictors/recipes.toml``."""

    chip: str
    hardware: str
    own: Sources
    others: Sources
    software: tuple[str, ...]
    twins: tuple[str, ...] = field(default=(), metadata=OPTIONAL)
    kernels: Mapping[str, tuple[str, ...]] = field(default_factory=dict, metadata=OPTIONAL)
    collectives: Sources = field(default=(), metadata=OPTIONAL)
    stated: Mapping[str, Ratio] = field(default_factory=dict, metadata=OPTIONAL)
    lent: Mapping[str, Sources] = field(default_factory=dict, metadata=OPTIONAL)
    teaches: bool = field(default=True, metadata=OPTIONAL)
    most_rows: int = field(default=0, metadata=OPTIONAL)


def _read_recipes() -> Mapping[str, Recipe]:
    tables = read_toml(SHIPPED / "recipes.toml")
    groups, recipes = tables["ratios"], {}
    for name, table in tables["recipes"].items():
        stated = {kind: ratio for group in table.pop("ratios", ()) for kind, ratio in groups[group].items()}
        recipes[name] = Recipe.from_dict({**table, "stated": stated})
    return MappingProxyType(recipes)


RECIPES = _read_recipes()

# Fabrics of tables, and the presets whose links they are.  ``cluster01`` reaches 48.9 GB/s per adapter.  Left out are
# networks of which nobody knows the links (Vidur's between nodes, ``cluster00``).
_LINKS = MappingProxyType(
    {name: name for name in ("dgx-a100", "dgx-h100", "dgx-b200", "pcie-gen4")}
    | {"nccl-tests-example-cluster01": "dgx-h100"}
)
_NCCL = r"nccl-tests|nccl .*half$|^nccl$"  # not in 8 bits, where switches do not sum


def teaching_names() -> tuple[str, ...]:
    """Names of the shipped predictors whose efficiencies teach other devices."""
    return tuple(name for name in shipped_names() if RECIPES[name].teaches)


def chip_of(hardware: str) -> str:
    """The chip of a hardware that a shipped predictor covers; empty if none does."""
    return next((r.chip for r in RECIPES.values() if hardware in (r.hardware, *r.twins)), "")


def recipe_for(name: str) -> str:
    """Name of the recipe of that name, or for that hardware; empty if there is none."""
    found = (own for own, recipe in RECIPES.items() if name in (own, recipe.hardware, *recipe.twins))
    return next(found, "")


@cached(64)
def shipped_predictor(name: str) -> Predictor | None:
    """The predictor of that name, or for that hardware; None if there is none."""
    own = recipe_for(name)
    if own not in shipped_names():
        return None
    recipe, predictor = RECIPES[own], Predictor.load(SHIPPED / own)
    facts = _preset(recipe.hardware)
    hardware = facts if name == own else _preset(name)  # current facts of the preset
    measured = predictor.kernel.hardware
    measured = replace(
        measured,
        peak_flops={**facts.peak_flops, **measured.peak_flops},  # of types that nobody measured, too
        power_w=facts.power_w,
        idle_w=facts.idle_w,
        exponentials_per_s=facts.exponentials_per_s,
        product_power_w=tabled_power_w(recipe.chip, facts),
    )
    hardware = replace(hardware, product_power_w=product_power_w(recipe.chip))
    serves = same_chip(hardware, measured) if hardware.name in recipe.twins else None
    kernel = replace(predictor.kernel, hardware=measured, serves=serves, software=recipe.kernels)
    near = published_runs().on((recipe.hardware, *recipe.twins))
    calibration = replace(predictor.calibration, dated=True)
    predictor = replace(predictor, hardware=hardware, kernel=kernel, calibration=calibration)
    return predictor.with_published(near if near.runs else None)


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
    rooms = {"dataset": "presets", "training": "shipped"}
    folders = [resources.files(f"stepsight.{room}").joinpath(folder) for room, folder in rooms.items()]
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
    """Make the shipped predictor of a recipe again from a folder of the public data, and write it.

    ``seed``: of everything random; 0 made what is shipped.  Raises ``PredictorError`` if there is no such recipe, or
    ``out`` is something else, and ``TableError`` if a source is not there or malformed.
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


PRESET = Path(__file__).with_name("product_power.json")
# Power beyond idle relative to the limit's.  On B200, products of 4e11 FLOP and more take 1.36 times as long in a long
# row (SimuMax) as alone (aiconfigurator), which is 2.5 times the power; larger values were never measured.
MOST_POWER_LOG = math.log(2.5)
PRIOR_STD_LOG = 0.06  # prior deviation of the clock's reduction by a power limit, centred at the table's, or at none
SOURCE_STD_LOG = 0.04  # deviation between sources of a chip: software and networks differ from the prediction
RUN_STD_LOG = 0.08  # deviation between runs of a source
ROUNDS = 50  # iterations of reweighting

# Slowdown of long products in 16 bits in the chip's table: the rate that the best tenth of products reaches if they
# take 0.4 to 0.8 ms, over the median of those rates from 1.6 ms on (bins of a factor of two; products of at least 1024
# in multiples of 128).  aiconfigurator, SGLang 0.5.14 (H100: 797 to 721 TFLOP/s) and 0.5.10 (A100: 263 to 254).
TABLED: Mapping[str, Mapping[str, float]] = {"H100": {"bf16": 1.105}, "A100": {"bf16": 1.035}}


@dataclass(frozen=True, slots=True)
class SourceClock:
    """Power of a chip estimated from the runs of one source."""

    # median of log(measured / predicted) over how much the time follows products: the logarithm of how many times as
    # long products took as alone, at the reference limit of the chip
    slowdown_log: float
    runs: int  # how many


@dataclass(frozen=True)
class ChipPower:
    """Power of a chip estimated from all sources."""

    reference_w: float  # the power limit for which sources speak: the highest of the chip's devices
    sources: Mapping[str, SourceClock]  # by name
    idle_w: float = 0.0  # hardware.idle_w of the chip's devices
    prior_log: float = 0.0  # logarithm of the slowdown that the chip's table shows; 0: none

    def slowdown_log(self, without: str = "") -> float:
        """Logarithm of the slowdown at the reference limit: Huber's mean of sources and the prior."""
        told = [source for name, source in self.sources.items() if name != without]
        variances = [SOURCE_STD_LOG**2 + RUN_STD_LOG**2 / source.runs for source in told]
        weights = [*(1.0 / variance for variance in variances), PRIOR_STD_LOG**-2]
        values = [*(source.slowdown_log for source in told), self.prior_log]
        mean, trust = 0.0, [1.0] * len(values)
        for _ in range(ROUNDS):
            own = [weight * part for weight, part in zip(weights, trust, strict=True)]
            mean = sum(weight * value for weight, value in zip(own, values, strict=True)) / sum(own)
            off = (abs(value - mean) * weight**0.5 for weight, value in zip(weights, values, strict=True))
            trust = [1.0 / max(1.0, each) for each in off]
        return mean

    def power_w(self, without: str = "") -> float:
        """Watts at the highest clock from all sources except one; 0 if there is no other, and no table shows it."""
        if not set(self.sources) - {without} and not self.prior_log:
            return 0.0
        excess = math.exp(min(3.0 * self.slowdown_log(without), MOST_POWER_LOG))
        return self.idle_w + (self.reference_w - self.idle_w) * excess

    def to_dict(self) -> dict[str, Any]:
        told = {name: [round(source.slowdown_log, 4), source.runs] for name, source in self.sources.items()}
        facts = {"reference_w": self.reference_w, "idle_w": self.idle_w, "prior_log": round(self.prior_log, 4)}
        return {**facts, "sources": told}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> ChipPower:
        told = {name: SourceClock(float(log), int(runs)) for name, (log, runs) in value["sources"].items()}
        return cls(float(value["reference_w"]), told, float(value["idle_w"]), float(value["prior_log"]))


def learn_chip(
    reference_w: float, runs: Mapping[str, Sequence[float]], idle_w: float = 0.0, prior_log: float = 0.0
) -> ChipPower:
    """Power of a chip from logarithms of its runs' slowdown of products, by source."""
    told = {name: SourceClock(median(logs), len(logs)) for name, logs in runs.items() if logs}
    return ChipPower(reference_w, told, idle_w, prior_log)


def tabled_power_w(chip: str, facts: Hardware) -> dict[str, float]:
    """Watts that the long products in a chip's table would have drawn at the highest clock, by type."""
    room = facts.power_w - facts.idle_w
    return {dtype: facts.idle_w + room * slowdown**3 for dtype, slowdown in TABLED.get(chip, {}).items()}


@cached(1)
def chip_powers() -> Mapping[str, Mapping[str, ChipPower]]:
    """The preset of the package, by chip and type of products."""
    table = read_json(PRESET)["chips"]
    return {chip: {dtype: ChipPower.from_dict(one) for dtype, one in each.items()} for chip, each in table.items()}


def product_power_w(chip: str, without: str = "") -> dict[str, float]:
    """``Hardware.product_power_w`` of a chip, without a source of published runs."""
    found = {dtype: power.power_w(without) for dtype, power in chip_powers().get(chip, {}).items()}
    return {dtype: watts for dtype, watts in found.items() if watts}


if __name__ == "__main__":
    sys.exit(main())
