"""A predictor's folder: its manifest, and the check that its files are unchanged.

The manifest lists the digest of every file; of itself, that of all but the digests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from stepsight.dataset.base.bounded import read_file, read_unpacked, reason
from stepsight.dataset.base.errors import PredictorError, StepsightError
from stepsight.dataset.base.files import check_writable, digest, read_json, write_json

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
    """Read the manifest of a folder.

    Raises:
        PredictorError: If it is none, or one of another schema.
    """
    return read_part(folder / MANIFEST, _manifest)


def changed_files(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Names of files that were changed, removed or added since the predictor was saved."""
    saved, found = manifest["files"], _digests(folder)
    if manifest["schema"] == UNSEALED:
        del found[MANIFEST]
    return sorted(name for name in {*saved, *found} if saved.get(name) != found.get(name))


def check_output(folder: Path) -> None:
    """Check that a predictor's folder is new, empty, or another predictor.

    Raises:
        StepsightError: If something else is there, or nothing can be written there.
    """
    rule = "a predictor is written to a new or empty folder or over a predictor, got"
    if folder.is_symlink():
        raise PredictorError(f"{rule} {folder}, a link")
    check_writable(folder.resolve().parent)
    if not folder.exists():
        return
    strangers = _strangers(folder) if folder.is_dir() else [folder.name]
    if strangers:
        raise PredictorError(f"{rule} {folder} with {', '.join(strangers[:3])}")


def read_part(path: Path, make: Callable[[Any], T]) -> T:
    """Parse one JSON file of a predictor.

    Raises:
        PredictorError: If it cannot be read, or ``make`` refuses what stands in it.
    """
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


def tree_text(folder: Path, name: Any) -> str:
    """LightGBM's text of trees in a file of a predictor.

    Raises:
        PredictorError: If it cannot be read.
    """
    path = folder / Path(str(name)).name  # never outside the folder
    try:
        return read_unpacked(path).decode("utf-8")
    except (OSError, ValueError) as error:
        raise PredictorError(f"every file of a predictor must be readable, got {path}: {reason(error)}") from None


def texts(value: Any, name: str) -> list[str]:
    """A list of strings.

    Raises:
        PredictorError: If it is none.
    """
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise PredictorError(f"{name} of a predictor must be a list of texts, got {value!r:.80}")
    return value


def _digests(folder: Path) -> dict[str, str]:
    """Digest of every file in a predictor's folder by name; empty for other entries."""
    found = {path.name: digest(read_file(path)) if path.is_file() else "" for path in sorted(folder.iterdir())}
    said = {key: value for key, value in read_json(folder / MANIFEST).items() if key != "files"}
    return {**found, MANIFEST: digest(json.dumps(said, sort_keys=True))}


def _strangers(folder: Path) -> list[str]:
    """Names in a folder that do not belong to a predictor."""
    try:
        table = read_json(folder / MANIFEST)
        ours = {MANIFEST, *table["files"]} if table["format"] == FORMAT else set()
    except (OSError, ValueError, KeyError, TypeError):
        ours = set()
    return sorted(path.name for path in folder.iterdir() if path.name not in ours)


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
    texts(table.get("fitted_rows", []), "fitted_rows")
    return table
