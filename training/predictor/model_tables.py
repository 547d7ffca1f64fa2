"""The files of a predictor's folder: its manifest, JSON tables of its models, and LightGBM's text of their trees.

The manifest lists the digest of every file; of itself, that of all but the digests.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from stepsight.dataset.base.bounded import read_file, read_unpacked, reason
from stepsight.dataset.base.errors import PredictorError, StepsightError
from stepsight.dataset.base.files import check_writable, digest, read_json, set_aside, write_json
from stepsight.dataset.hardware.hardware import Hardware, hardware_from_dict
from stepsight.dataset.kinds import CollectiveKind, OpKind
from stepsight.dataset.kinds.op import COLLECTIVE_KINDS, OP_KINDS
from stepsight.features.collective_features import COLLECTIVE_AXES, COLLECTIVE_FEATURES, COLLECTIVE_TERMS, NCCL_TERMS
from stepsight.features.node_features import FEATURE_VERSION, OP_TERMS, check_version, op_feature_names
from stepsight.gnn.contexts import CONFIG, OWN, TABLE, Context, read_context
from stepsight.training.collectives.collective_models import BOUNDS, NCCL_BOUNDS, CollectiveModel
from stepsight.training.kernels.host_calls import CALL_FEATURES, HostCalls
from stepsight.training.kernels.kernel_models import KernelModel, num_axes, op_bounds, same_chip
from stepsight.training.kernels.transferred import Teacher, Transfer
from stepsight.training.regression.regressor import Regressor
from stepsight.training.regression.trees import Trees

FORMAT = "stepsight-predictor"
SCHEMA = 5
UNSEALED = 4  # of older versions: read if no table of runs was fitted
MANIFEST = "manifest.json"
REGISTERED = "models:/"  # how the name of a predictor in MLflow's registry begins
T = TypeVar("T")


def write_manifest(folder: Path, manifest: Mapping[str, Any], hardware: str) -> None:
    """Write the manifest with the digests of all other files of a predictor."""
    own = {**manifest, "format": FORMAT, "schema": SCHEMA, "hardware": hardware}
    write_json(folder / MANIFEST, own)
    write_json(folder / MANIFEST, {**own, "files": _digests(folder)})


def read_predictor_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a folder.  Raises ``PredictorError`` if it is none, or one of another schema."""
    return read_part(folder / MANIFEST, _manifest)


def read_folder(folder: Path, parse: Callable[[dict[str, Any]], T], shipped: Sequence[str]) -> T:
    """Read a predictor's folder (``parse``: given its manifest), none of whose files may have been changed."""
    old = set_aside(folder)
    if old is not None:
        raise PredictorError(
            f"{folder} is missing: a command was killed while it replaced it; the old one is complete in {old}. "
            f"To restore it: mv {old} {folder}"
        )
    if not (folder / MANIFEST).is_file():
        names = "".join(f", or {name}" for name in shipped)
        raise PredictorError(f"a predictor is a folder with manifest.json{names}, got {folder}")
    manifest = read_predictor_manifest(folder)
    saved, found = manifest["files"], _digests(folder)
    if manifest["schema"] == UNSEALED:
        del found[MANIFEST]
    changed = sorted(name for name in {*saved, *found} if saved.get(name) != found.get(name))  # removed or added, too
    rule = f"{folder}: files must be those that were saved, got changed, missing or added"
    if not all(name.endswith(".json") for name in changed):  # libraries may read only files that stepsight wrote
        raise PredictorError(f"{rule} {', '.join(changed)}")
    try:  # for a changed table, its own error is more helpful
        loaded = parse(manifest)
    except Exception as error:
        if not changed or isinstance(error, PredictorError):
            raise
    else:
        if not changed:
            return loaded
    raise PredictorError(f"{rule} {', '.join(changed)}")


def check_output(folder: Path) -> None:
    """Check that a predictor's folder is new, empty, or another predictor, and can be written."""
    rule = "a predictor is written to a new or empty folder or over a predictor, got"
    if folder.is_symlink():
        raise PredictorError(f"{rule} {folder}, a link")
    check_writable(folder.resolve().parent)
    if not folder.exists():
        return
    strangers = [folder.name]
    if folder.is_dir():
        try:
            table = read_json(folder / MANIFEST)
            ours = {MANIFEST, *table["files"]} if table["format"] == FORMAT else set()
        except (OSError, ValueError, KeyError, TypeError):
            ours = set()
        strangers = sorted(path.name for path in folder.iterdir() if path.name not in ours)
    if strangers:
        raise PredictorError(f"{rule} {folder} with {', '.join(strangers[:3])}")


def read_part(path: Path, make: Callable[[Any], T]) -> T:
    """Parse one JSON file of a predictor; one that is broken, or that ``make`` refuses, is a ``PredictorError``."""
    try:
        table = read_json(path)
    except (OSError, ValueError) as error:
        raise PredictorError(f"every file of a predictor must be readable, got {path}: {reason(error)}") from None
    return made(path, make, table)


def made(path: Path, make: Callable[[Any], T], table: Any) -> T:
    """Build an object from a part of a file; see ``read_part``."""
    try:
        return make(table)
    except StepsightError as error:
        raise PredictorError(f"{path}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise PredictorError(f"{path} must be what Predictor.save wrote, got {type(error).__name__}: {error}") from None


def _digests(folder: Path) -> dict[str, str]:
    """Digest of every file in a predictor's folder by name; empty for other entries."""
    found = {path.name: digest(read_file(path)) if path.is_file() else "" for path in sorted(folder.iterdir())}
    said = {key: value for key, value in read_json(folder / MANIFEST).items() if key != "files"}
    return {**found, MANIFEST: digest(json.dumps(said, sort_keys=True))}


def _manifest(table: dict[str, Any]) -> dict[str, Any]:
    if table.get("format") != FORMAT or table.get("schema") not in (SCHEMA, UNSEALED):
        raise PredictorError(
            f"a predictor must have format {FORMAT!r:.80} and schema {SCHEMA}, "
            f"got {table.get('format')!r:.80} and {table.get('schema')!r:.80}"
        )
    for key in ("hardware", "name", "digest"):
        text = table.get(key, "" if key != "hardware" else None)
        if not isinstance(text, str) or not text.isprintable():
            raise PredictorError(f"{key} of a predictor must be a printable text, got {text!r:.80}")
    files = table.get("files")
    if not isinstance(files, dict) or not all(isinstance(of, str) and of for of in files.values()):
        raise PredictorError(f"a predictor must list the digests of its files, got {files!r:.80}")
    rows = table.get("fitted_rows", [])
    if not isinstance(rows, list) or not all(isinstance(row, str) for row in rows):
        raise PredictorError(f"fitted_rows of a predictor must be a list of texts, got {rows!r:.80}")
    return table


KEY = "features"
FILE = "host_calls.json"
Kinds = Mapping[str, OpKind] | Mapping[str, CollectiveKind]


def save_kernel(kernel: KernelModel, folder: Path) -> None:
    """Write ``kernel.json`` and the trees of ops."""
    more = kernel.to_dict()
    if kernel.serves is not None:
        more["measured_on"] = kernel.hardware.to_dict()
    if isinstance(kernel.transfer, Transfer):
        more["transfer"] = kernel.transfer.to_dict()
    _save_regressor(kernel.regressor, folder, "kernel", more, OP_TERMS, OP_KINDS)


def load_kernel(folder: Path, hardware: Hardware, teacher_of: Callable[[str], Teacher]) -> KernelModel:
    """Read what ``save_kernel`` wrote; another device with the same chip as ``hardware`` may have been measured."""

    def make(table: dict[str, Any]) -> KernelModel:
        measured = hardware_from_dict(table["measured_on"]) if "measured_on" in table else hardware
        regressor = _regressor(folder, table, OP_TERMS, OP_KINDS, op_feature_names())
        regressor.check(num_axes, lambda label: op_bounds(measured, OP_KINDS[_kind_of(label)]))
        kernel = KernelModel.from_dict(
            table,
            hardware=measured,
            regressor=regressor,
            serves=None if measured is hardware else same_chip(hardware, measured),
            transfer=Transfer.from_dict(table["transfer"], hardware, teacher_of) if "transfer" in table else None,
        )
        for at, kind in kernel.traced.items():
            kind.check(num_axes(at))
        return kernel

    return read_part(folder / "kernel.json", make)


def save_collective(collective: CollectiveModel, folder: Path) -> None:
    """Write ``collective.json`` and the trees of collectives."""
    terms = NCCL_TERMS if collective.nccl else COLLECTIVE_TERMS
    _save_regressor(collective.regressor, folder, "collective", collective.to_dict(), terms, COLLECTIVE_KINDS)


def load_collective(folder: Path) -> CollectiveModel:
    """Read what ``save_collective`` wrote; a table without ``nccl`` was trained on one host's messages."""

    def make(table: dict[str, Any]) -> CollectiveModel:
        nccl = table.get("nccl", False)
        terms = NCCL_TERMS if nccl else COLLECTIVE_TERMS
        regressor = _regressor(folder, table, terms, COLLECTIVE_KINDS, COLLECTIVE_FEATURES)
        regressor.check(lambda label: COLLECTIVE_AXES, lambda label: NCCL_BOUNDS if nccl else BOUNDS)
        return CollectiveModel.from_dict(table, regressor=regressor)

    return read_part(folder / "collective.json", make)


def save_host_calls(host: HostCalls, folder: Path) -> None:
    """Write ``host_calls.json`` and the trees of calls."""
    files = {family: _save_trees(trees, folder, f"host.{family}") for family, trees in host.trees.items()}
    write_json(folder / FILE, {**host.to_dict(), "trees": files})


def load_host_calls(folder: Path) -> HostCalls | None:
    """Read what ``save_host_calls`` wrote; None if the predictor has none."""
    if not (folder / FILE).exists():
        return None

    def make(table: dict[str, Any]) -> HostCalls:
        trees = {name: _trees(folder, file, 1.0, CALL_FEATURES) for name, file in table["trees"].items()}
        return HostCalls.from_dict(table, trees=trees)

    return read_part(folder / FILE, make)


def load_context(folder: Path) -> Context | None:
    """The context model of a predictor's folder, None if it has none; two are a ``PredictorError``."""
    found = [name for name in (CONFIG, TABLE, OWN) if (folder / name).exists()]
    if len(found) > 1:
        raise PredictorError(f"a predictor has one context model, got {' and '.join(found)} in {folder}")
    return read_part(folder / found[0], partial(read_context, folder / found[0])) if found else None


def _save_regressor(
    regressor: Regressor, folder: Path, name: str, more: Mapping[str, Any], terms: Sequence[str], kinds: Kinds
) -> None:
    trees = {
        label: {"file": _save_trees(model, folder, f"{name}.{label.replace('/', '-')}"), "share": model.share}
        for label, model in regressor.trees.items()
    }
    codes = {kind: kinds[kind].code for kind in sorted(set(map(_kind_of, regressor.physics)))}
    features = {"version": FEATURE_VERSION, "terms": list(terms), "codes": codes}
    write_json(folder / f"{name}.json", {**regressor.to_dict(), **more, KEY: features, "trees": trees})


def _regressor(
    folder: Path, table: dict[str, Any], terms: Sequence[str], kinds: Kinds, features: Sequence[str]
) -> Regressor:
    """Read and check a saved regressor against this version; those without a description have version 1.

    ``terms``: names of the physical terms that this version computes.  ``kinds``: records of the kinds that there are.
    Raises ``PredictorError`` if it reads other terms or features, or kinds that are not there or have other codes.
    """
    said = table.get(KEY, {})
    check_version(said.get("version", 1), "a regressor")
    if list(said.get("terms", terms)) != list(terms):
        raise PredictorError(
            f"a regressor must be fitted to the terms {', '.join(terms)}, got {', '.join(map(str, said['terms']))}: "
            "train the predictor again"
        )
    missing = sorted({_kind_of(label) for label in table.get("physics", ())} - set(kinds))
    if missing:
        raise PredictorError(
            f"a predictor was trained on kinds that this version does not have: {', '.join(missing)}: register them "
            "(stepsight.dataset.kinds) or train the predictor again"
        )
    saved = {name: code for name, code in said.get("codes", {}).items() if name in kinds}
    moved = [f"{name} {code} != {kinds[name].code}" for name, code in saved.items() if code != kinds[name].code]
    if moved:
        raise PredictorError(
            f"codes of kinds must be those that the predictor was trained with, got {', '.join(moved)}: register the "
            "kinds with their former codes or train the predictor again"
        )
    trees = {
        label: _trees(folder, model["file"], float(model["share"]), features) for label, model in table["trees"].items()
    }
    return Regressor.from_dict(table, trees=trees)


def _save_trees(trees: Trees, folder: Path, stem: str) -> str:
    """Write LightGBM's text; returns the file's name."""
    (folder / f"{stem}.txt.gz").write_bytes(gzip.compress(trees.text.encode(), mtime=0))
    return f"{stem}.txt.gz"


def _trees(folder: Path, file: Any, share: float, features: Sequence[str]) -> Trees:
    path = folder / Path(str(file)).name  # never outside the folder
    try:
        trees = Trees(read_unpacked(path).decode("utf-8"), share)
    except (OSError, ValueError) as error:
        raise PredictorError(f"every file of a predictor must be readable, got {path}: {reason(error)}") from None
    trees.check(features)
    return trees


def _kind_of(label: str) -> str:
    """The kind in a regressor's label: ``linear`` of ``linear/fp8``."""
    return label.split("/")[0]
