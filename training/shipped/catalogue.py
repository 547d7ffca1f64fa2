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

from stepsight.dataset.base.bounded import read_toml
from stepsight.dataset.base.caching import cached
from stepsight.dataset.base.codec import OPTIONAL, Saved
from stepsight.dataset.base.errors import PredictorError, StepsightError
from stepsight.dataset.base.files import digest
from stepsight.dataset.hardware.hardware import Hardware, find_hardware
from stepsight.dataset.kinds.op import COLLECTIVE_KINDS, OP_KINDS
from stepsight.training.corrections.residual import published_runs
from stepsight.training.kernels.kernel_models import Ratio, label, same_chip
from stepsight.training.predictor.model_tables import read_predictor_manifest
from stepsight.training.predictor.predictor import SHIPPED, Predictor, shipped_names
from stepsight.training.shipped.product_power import product_power_w, tabled_power_w

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
