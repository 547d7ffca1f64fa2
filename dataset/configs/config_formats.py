"""Find the framework of a configuration file, and its reader."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.base.files import parse_json
from stepsight.dataset.configs.accelerate_in import (
    is_accelerate,
    is_fsdp,
    is_training_arguments,
    read_accelerate,
    read_fsdp,
    read_training_arguments,
)
from stepsight.dataset.configs.deepspeed_in import is_deepspeed, read_deepspeed
from stepsight.dataset.configs.documents import read_source, read_tables
from stepsight.dataset.configs.drafts import Draft, Given
from stepsight.dataset.configs.huggingface_in import is_huggingface, read_huggingface
from stepsight.dataset.configs.maxtext_in import is_maxtext, read_maxtext
from stepsight.dataset.configs.megatron_in import read_megatron
from stepsight.dataset.configs.megatron_words import settings_of_script, settings_of_tables, settings_of_words
from stepsight.dataset.configs.nanotron_in import is_nanotron, read_nanotron
from stepsight.dataset.configs.nemo_in import is_nemo, read_nemo
from stepsight.dataset.configs.shell_scripts import read_script
from stepsight.dataset.configs.torchtitan_in import is_torchtitan, read_torchtitan
from stepsight.dataset.configs.torchtitan_registry import read_registry
from stepsight.dataset.job.job import Job

Reader = Callable[[Path, Draft, Given], None]


def reader_of(path: Path) -> tuple[str, Reader]:
    """The name of a file's format, and the function that reads it.

    Raises:
        JobError: If it is none of a known framework.
    """
    if path.suffix in (".json", ".toml", ".yaml", ".yml"):
        tables = read_tables(path)
        for name, (fits, read) in _TABLES.items():
            if fits(tables):
                return name, read
        shown = ", ".join(map(str, list(tables)[:8])) or "nothing"
        raise JobError(f"{path} must be a configuration of {', '.join(_TABLES)}, got tables {shown:.120}")
    if path.suffix == ".py":
        return "torchtitan-registry", read_registry
    return "megatron", _words_file


def is_job(tables: Mapping[str, Any]) -> bool:
    """Whether tables are those of a job file."""
    model = tables.get("model")
    return isinstance(tables.get("cluster"), Mapping) and isinstance(model, Mapping) and "flavor" not in model


def _job_file(path: Path, draft: Draft, given: Given) -> None:
    """Map all keys that a job file states."""
    job = Job.from_file(path)
    draft.framework = job.framework
    for section, table in job.to_dict().items():
        for key, value in table.items() if isinstance(table, Mapping) else ():
            draft.map(f"{section}.{key}", value, "job file")


def is_job_file(path: Path) -> bool:
    """Whether to read a file as a job file: any TOML or JSON file that is no other framework's configuration."""
    if path.suffix not in (".toml", ".json"):
        return False
    try:
        tables = read_tables(path)
    except JobError:
        return True  # who reads it says what is wrong
    return not any(fits(tables) for name, (fits, _) in _TABLES.items() if name != "job") or is_job(tables)


def _words_file(path: Path, draft: Draft, given: Given) -> None:
    """A shell script, or a file of arguments."""
    text = read_source(path)
    if re.match(r"(\s*(#[^\n]*)?\n)*\s*--?[A-Za-z]", text):
        try:
            lines = re.sub(r"(?m)^[ \t]*#.*", "", text)  # a comment ends with its line, even after a backslash
            words = shlex.split(lines.replace("\\\n", " "), comments=True)
        except ValueError as error:
            raise JobError(f"a file of arguments must be words of a shell, got {error}") from None
        settings = settings_of_words(words)
    else:
        script = read_script(text, dict(given.variables), path.parent)
        for document in script.documents:
            _deepspeed_document(document, draft)
        settings = settings_of_script(script, draft)
    read_megatron(settings, draft)


def _deepspeed_document(text: str, draft: Draft) -> None:
    """DeepSpeed's JSON that a script writes for its command; other documents are not read."""
    if not text.lstrip().startswith("{"):
        return
    try:
        tables = parse_json(text)
    except (ValueError, RecursionError):
        return
    if isinstance(tables, dict) and is_deepspeed(tables):
        read_deepspeed(tables, draft)


def _model_arguments(path: Path, draft: Draft, given: Given) -> None:
    """Arguments by name, as in Megatron-LM's functional tests."""
    tables = read_tables(path)
    words: list[str] = []
    for flag, value in tables["MODEL_ARGS"].items():
        if value is False:
            continue
        words += [str(flag)] + (
            [] if value is True else [str(v) for v in (value if isinstance(value, list) else [value])]
        )
    read_megatron(settings_of_words(words), draft)


def _megatron_yaml(path: Path, draft: Draft, given: Given) -> None:
    """Megatron-Core's YAML file (``--yaml-cfg``)."""
    settings = settings_of_tables(read_tables(path))
    read_megatron(settings, draft)


def _has(*names: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda tables: all(isinstance(tables.get(name), Mapping) for name in names)


def _torchtitan(path: Path, draft: Draft, given: Given) -> None:
    read_torchtitan(read_tables(path), draft, read_source(path))


def _huggingface(path: Path, draft: Draft, given: Given) -> None:
    read_huggingface(read_tables(path), draft)


def _deepspeed(path: Path, draft: Draft, given: Given) -> None:
    read_deepspeed(read_tables(path), draft)


def _accelerate(path: Path, draft: Draft, given: Given) -> None:
    read_accelerate(read_tables(path), draft, path.parent)


def _fsdp(path: Path, draft: Draft, given: Given) -> None:
    read_fsdp(read_tables(path), draft)


def _nanotron(path: Path, draft: Draft, given: Given) -> None:
    read_nanotron(read_tables(path), draft)


def _maxtext(path: Path, draft: Draft, given: Given) -> None:
    read_maxtext(path, draft)


def _nemo(path: Path, draft: Draft, given: Given) -> None:
    read_nemo(read_tables(path), draft)


def _training_arguments(path: Path, draft: Draft, given: Given) -> None:
    read_training_arguments(read_tables(path), draft, path.parent)


_TABLES: dict[str, tuple[Callable[[Mapping[str, Any]], bool], Reader]] = {
    "job": (is_job, _job_file),
    "torchtitan": (is_torchtitan, _torchtitan),
    "megatron-arguments": (_has("MODEL_ARGS"), _model_arguments),
    "megatron-yaml": (_has("language_model"), _megatron_yaml),
    "nemo": (is_nemo, _nemo),
    "nanotron": (is_nanotron, _nanotron),
    "maxtext": (is_maxtext, _maxtext),
    "huggingface": (is_huggingface, _huggingface),
    "accelerate": (is_accelerate, _accelerate),
    "training-arguments": (is_training_arguments, _training_arguments),
    "deepspeed": (is_deepspeed, _deepspeed),
    "fsdp": (is_fsdp, _fsdp),
}
