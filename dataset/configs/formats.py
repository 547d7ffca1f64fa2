"""Formats of configurations: which files are one, how one is read, and how a job is written as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.base.registry import Registry, check_takes, instance_of
from stepsight.dataset.configs import accelerate, huggingface, maxtext, megatron_words, nanotron, torchtitan
from stepsight.dataset.configs.drafts import ConfigFile, Draft, Given
from stepsight.dataset.configs.key_table import ConfigText
from stepsight.dataset.configs.megatron import write_megatron
from stepsight.dataset.job.job import Job, JobLike


@dataclass(frozen=True, slots=True)
class ConfigFormat:
    """A format of configurations; a user adds one with ``CONFIG_FORMATS.register``.

    Attributes:
        fits: Whether a file has the format.  Formats of users are asked before those of the package.
        read: Reads a file into a draft of a job; None: the format is only written.
        write: Makes the text of a configuration from a job; None: the format is only read.

    Raises:
        JobError: On construction, if a function does not take these arguments.
    """

    fits: Callable[[ConfigFile], bool] | None = None
    read: Callable[[ConfigFile, Draft], None] | None = None
    write: Callable[[Job], ConfigText] | None = None

    def __post_init__(self) -> None:
        takes = {"fits": ("file",), "read": ("file", "draft"), "write": ("job",)}
        for name, arguments in takes.items():
            if getattr(self, name) is not None:
                check_takes(f"{name} of a configuration format", getattr(self, name), arguments, JobError)
        if (self.fits is None) != (self.read is None) or (self.read is None and self.write is None):
            raise JobError("a configuration format needs fits and read, or write, or all of them")


def read_config(path: Path, draft: Draft, given: Given) -> str:
    """Read a configuration into a draft; return the name of its format.

    Raises:
        JobError: If it is of no known format, or cannot be read.
    """
    file = ConfigFile.open(path, given)
    name, form = _format_of(file)
    if form is None or form.read is None:
        known = ", ".join(name for name, form in CONFIG_FORMATS.items() if form.read)
        shown = ", ".join(map(str, list(file.tables)[:8])) or "nothing"
        raise JobError(f"{path} must be a configuration of {known}, got tables {shown:.120}")
    try:
        form.read(file, draft)
    except JobError as error:
        raise JobError(f"{path}: {error}") from None
    return name


def _format_of(file: ConfigFile) -> tuple[str, ConfigFormat | None]:
    CONFIG_FORMATS.load()
    ordered = sorted(CONFIG_FORMATS.items(), key=lambda pair: pair[0] in _BUILT_IN)
    return next(((name, form) for name, form in ordered if form.fits and form.fits(file)), ("", None))


def is_job_file(path: Path) -> bool:
    """Whether to read a file as a job file: any TOML or JSON file that is no other framework's configuration."""
    if path.suffix not in (".toml", ".json"):
        return False
    try:
        return _format_of(ConfigFile.open(path))[0] in ("", "job")
    except JobError:
        return True  # who reads it says what is wrong


def write_config(job: JobLike, name: str) -> ConfigText:
    """Write a job as a configuration.

    Args:
        job: As in ``predict``.
        name: Of a format that can be written: one of ``written_formats()``.

    Returns:
        The text, the keys that the framework does not express, and notes for the user.

    Raises:
        JobError: If the format is unknown, or the framework has no such model.

    Example:
        >>> print(write_config(Job.from_file("job.toml"), "megatron").text)  # doctest: +SKIP
    """
    write = CONFIG_FORMATS[name].write if name in CONFIG_FORMATS else None
    if write is None:
        raise JobError(f"a configuration must be of {', '.join(written_formats())}, got {name!r:.80}")
    return write(Job.of(job))


def written_formats() -> tuple[str, ...]:
    """Names of the formats that can be written."""
    return tuple(name for name in CONFIG_FORMATS.names() if CONFIG_FORMATS[name].write is not None)


def _with(*alternatives: str) -> Callable[[ConfigFile], bool]:
    """Whether the tables of a file have all places of one alternative: ``a.b``, a table ``a.``, or no ``!a``."""

    def has(tables: Any, place: str) -> bool:
        for name in place.strip("!.").split("."):
            tables = tables.get(name, _MISSING) if isinstance(tables, Mapping) else _MISSING
        if place.startswith("!"):
            return tables in (_MISSING, None)
        return isinstance(tables, Mapping) if place.endswith(".") else tables is not _MISSING

    return lambda file: any(all(has(file.tables, place) for place in one.split()) for one in alternatives)


def _read_job(file: ConfigFile, draft: Draft) -> None:
    """Map all keys that a job file states."""
    job = Job.from_file(file.path)
    draft.framework = job.framework
    for section, table in job.to_dict().items():
        for key, value in table.items() if isinstance(table, Mapping) else ():
            draft.map(f"{section}.{key}", value, "job file")


_MISSING = object()
_FSDP = (
    *("sharding_strategy", "auto_wrap_policy", "transformer_layer_cls_to_wrap", "backward_prefetch", "state_dict_type"),
    *("reshard_after_forward", "activation_checkpointing", "min_num_params", "forward_prefetch", "use_orig_params"),
)
_ARGUMENTS = ("per_device_train_batch_size", "gradient_checkpointing", "output_dir", "num_train_epochs")
_MAXTEXT = ("base_emb_dim", "base_num_decoder_layers", "per_device_batch_size", "ici_fsdp_parallelism", "base_config")
_SIZES = (*huggingface.LAYERS, *huggingface.HIDDEN)
CONFIG_FORMATS: Registry[ConfigFormat] = Registry(
    "configuration format",
    {
        "job": ConfigFormat(_with("cluster. model. !model.flavor"), _read_job),
        "megatron": ConfigFormat(
            lambda file: not file.has_tables and file.path.suffix != ".py", megatron_words.read_words, write_megatron
        ),
        "megatron-script": ConfigFormat(write=partial(write_megatron, script=True)),
        "megatron-arguments": ConfigFormat(_with("MODEL_ARGS."), megatron_words.read_arguments),
        "megatron-yaml": ConfigFormat(_with("language_model."), megatron_words.read_yaml),
        "torchtitan": ConfigFormat(
            _with("model.flavor", "!model training. parallelism."),
            torchtitan.read_torchtitan,
            torchtitan.write_torchtitan,
        ),
        "torchtitan-registry": ConfigFormat(lambda file: file.path.suffix == ".py", torchtitan.read_registry),
        "nemo": ConfigFormat(
            _with("trainer. model.hidden_size", "trainer. model.encoder.hidden_size"), megatron_words.read_nemo
        ),
        "nanotron": ConfigFormat(
            _with("tokens. parallelism. model.model_config"), nanotron.read_nanotron, nanotron.write_nanotron
        ),
        "maxtext": ConfigFormat(_with(*_MAXTEXT), maxtext.read_maxtext, maxtext.write_maxtext),
        "huggingface": ConfigFormat(
            _with("model_type", *(f"architectures {name}" for name in _SIZES)),
            huggingface.read_model,
            huggingface.write_model,
        ),
        "accelerate": ConfigFormat(
            _with("distributed_type", "num_processes mixed_precision"),
            accelerate.read_accelerate,
            accelerate.write_accelerate,
        ),
        "training-arguments": ConfigFormat(
            _with(*map(" ".join, combinations(_ARGUMENTS, 2))), accelerate.read_training_arguments
        ),
        "deepspeed": ConfigFormat(
            _with(*accelerate.DEEPSPEED_MARKS), accelerate.read_deepspeed, accelerate.write_deepspeed
        ),
        "fsdp": ConfigFormat(_with(*_FSDP, *(f"fsdp_{name}" for name in _FSDP)), accelerate.read_fsdp),
    },
    group="stepsight.config_formats",
    check=instance_of(ConfigFormat),
    error=JobError,
)
_BUILT_IN = tuple(CONFIG_FORMATS)
