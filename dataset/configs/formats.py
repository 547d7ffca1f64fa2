"""Formats of configurations: which files are one, how one is read, and how a job is written as one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial, reduce
from itertools import combinations
from operator import getitem
from pathlib import Path
from typing import Any

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.base.registry import Registry, check_takes, instance_of
from stepsight.dataset.configs import accelerate, huggingface, maxtext, nanotron, recommendation, torchtitan
from stepsight.dataset.configs import megatron_words as words
from stepsight.dataset.configs.documents import facts, toml_text
from stepsight.dataset.configs.drafts import ConfigFile, Draft, Given
from stepsight.dataset.configs.key_table import DEFAULTS, ConfigText
from stepsight.dataset.configs.megatron import write_megatron
from stepsight.dataset.job.job import Job, JobLike


@dataclass(frozen=True, slots=True)
class ConfigFormat:
    """A format of configurations; a user adds one with ``CONFIG_FORMATS.register``.

    Raises:
        JobError: On construction, if a function does not take these arguments.
    """

    fits: Callable[[ConfigFile], bool] | None = None  # formats of users are asked before those of the package
    read: Callable[[ConfigFile, Draft], None] | None = None  # None: the format is only written
    write: Callable[[Job], ConfigText] | None = None  # None: the format is only read
    families: tuple[str, ...] = ()  # of models that are written; empty: all but dlrm

    def __post_init__(self) -> None:
        if not isinstance(self.families, tuple) or not all(isinstance(family, str) for family in self.families):
            raise JobError(f"families of a configuration format must be a tuple of names, got {self.families!r:.80}")
        for name, arguments in {"fits": ("file",), "read": ("file", "draft"), "write": ("job",)}.items():
            if getattr(self, name) is not None:
                check_takes(f"{name} of a configuration format", getattr(self, name), arguments, JobError)
        if (self.fits is None) != (self.read is None) or (self.read is None and self.write is None):
            raise JobError("a configuration format needs fits and read, or write, or all of them")


def format_of(file: ConfigFile) -> tuple[str, ConfigFormat | None]:
    """The format of a file, by name; an empty name if it has none."""
    CONFIG_FORMATS.load()
    ordered = sorted(CONFIG_FORMATS.items(), key=lambda pair: pair[0] in _BUILT_IN)
    return next(((name, form) for name, form in ordered if form.fits and form.fits(file)), ("", None))


def is_job_file(path: Path) -> bool:
    """Whether to read a file as a job file: any TOML or JSON file that is no other framework's configuration."""
    with suppress(JobError):  # who reads it says what is wrong
        return path.suffix in (".toml", ".json") and format_of(ConfigFile.open(path))[0] in ("", "job")
    return True


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
    form, job = CONFIG_FORMATS.get(name), Job.of(job)
    if form is None or form.write is None:
        raise JobError(f"a configuration must be of {', '.join(written_formats())}, got {name!r:.80}")
    family, families = job.model.family, form.families
    if family not in families if families else family == "dlrm":
        known = f"it has {', '.join(families) or 'transformers'}"
        raise JobError(f"{name} has no model of the family {family!r:.80}: {known}")
    text = form.write(job)
    if not isinstance(text, ConfigText):
        raise JobError(f"write of the configuration format {name} must return a ConfigText, got {text!r:.80}")
    return text


def written_formats() -> tuple[str, ...]:
    """Names of the formats that can be written."""
    return tuple(name for name in CONFIG_FORMATS.names() if CONFIG_FORMATS[name].write is not None)


def _with(name: str) -> Callable[[ConfigFile], bool]:
    """Whether a file's tables have all places of one of a format's marks: ``a.b``, a table ``a.``, or no ``!a``."""

    def has(tables: Any, place: str) -> bool:
        for part in place.strip("!.").split("."):
            tables = tables.get(part, ...) if isinstance(tables, Mapping) else ...
        if place.startswith("!"):
            return tables in (..., None)
        return isinstance(tables, Mapping) if place.endswith(".") else tables is not ...

    return lambda file: any(all(has(file.tables, place) for place in one.split()) for one in _MARKS[name])


def _read_job(file: ConfigFile, draft: Draft) -> None:
    """Map all keys that a job file states; what follows from them is assumed, and defaults are left out."""
    given = {key: value for key, value in file.given.values.items() if key in DEFAULTS}
    job = Job.from_file(file.path, given=given)
    draft.framework, told = job.framework, asdict(job)
    told["model"]["vocab"] = job.own_vocab[0]  # as its framework has it before it pads
    for key, default in DEFAULTS.items():
        section, _, name = key.partition(".")
        value, stated = told[section][name], file.tables.get(section)
        if isinstance(stated, Mapping) and name in stated:
            draft.map(key, value, "job file")
        elif value != default:
            draft.assume(key, value, "follows from what the job file states")


_DECODERS = ("llama", "gpt")
_TRANSFORMERS = (*_DECODERS, "bert", "t5", "vit")
_SIZES = ("model.layers", "model.hidden")
_MODEL = [f"architectures {name}" for row in huggingface.ROWS if row.key in _SIZES for name in row.names]
_MARKS: dict[str, list[str]] = {
    **facts()["marks"],
    "huggingface": ["model_type", *_MODEL],
    "deepspeed": [*accelerate.DEEPSPEED_MARKS],
    "training-arguments": [*map(" ".join, combinations(facts()["marks"]["training-arguments"], 2))],
    "fsdp": [way + name for name in facts()["marks"]["fsdp"] for way in ("", "fsdp_")],
}
CONFIG_FORMATS: Registry[ConfigFormat] = Registry(
    "configuration format",
    {
        "job": ConfigFormat(_with("job"), _read_job),
        "dlrm": ConfigFormat(recommendation.has_flags, recommendation.read_flags),
        "hugectr": ConfigFormat(_with("hugectr"), recommendation.read_hugectr),
        "megatron": ConfigFormat(recommendation.is_words, words.read_words, write_megatron, _TRANSFORMERS),
        "megatron-script": ConfigFormat(write=partial(write_megatron, script=True), families=_TRANSFORMERS),
        "megatron-arguments": ConfigFormat(_with("megatron-arguments"), words.read_arguments),
        "megatron-yaml": ConfigFormat(_with("megatron-yaml"), words.read_yaml),
        "megatron-bridge": ConfigFormat(_with("megatron-bridge"), words.read_bridge),
        "torchtitan": ConfigFormat(_with("torchtitan"), torchtitan.read, torchtitan.write, _DECODERS),
        "torchtitan-registry": ConfigFormat(lambda file: file.path.suffix == ".py", torchtitan.read_registry),
        "nemo": ConfigFormat(_with("nemo"), words.read_nemo),
        "nanotron": ConfigFormat(_with("nanotron"), nanotron.read, nanotron.write, _DECODERS),
        "torchrec": ConfigFormat(write=recommendation.write_plan, families=("dlrm",)),
        "maxtext": ConfigFormat(_with("maxtext"), maxtext.read, maxtext.write, _DECODERS),
        "huggingface": ConfigFormat(_with("huggingface"), huggingface.read, huggingface.write, _TRANSFORMERS),
        "peft": ConfigFormat(_with("peft"), huggingface.read_adapters),
        "accelerate": ConfigFormat(_with("accelerate"), accelerate.read, accelerate.write),
        "training-arguments": ConfigFormat(_with("training-arguments"), accelerate.read_training),
        "deepspeed": ConfigFormat(_with("deepspeed"), accelerate.read_deepspeed, accelerate.write_deepspeed),
        "fsdp": ConfigFormat(_with("fsdp"), accelerate.read_fsdp),
    },
    group="stepsight.config_formats",
    check=instance_of(ConfigFormat),
    error=JobError,
)
_BUILT_IN = tuple(CONFIG_FORMATS)
_SCRIPTS = ("megatron", "dlrm")  # formats of files with variables
_SEVERAL = (*_SCRIPTS, "torchtitan-registry")  # of files that may hold several configurations


HARDWARE, DEVICES_PER_NODE = "h100-sxm-80gb", 8
_MOST_TRIED = 1024  # numbers of devices
_CLUSTER = ("nodes", "devices_per_node")
_NEEDED = ("family", "layers", "hidden", "heads", "vocab", "seq_len")


@dataclass(frozen=True)
class ConfigJob:
    """A job that was read from configuration files, and how.

    Attributes:
        read: The job; None if the configurations do not state all sizes of the model.
        tables: Tables of a job file: ``mapped`` and ``assumed`` in their sections.
        sources: The words of the configuration, by key of ``mapped``.
        reasons: Why a value is assumed, by key of ``assumed``.
        ignored: Settings that no key of a job expresses.
        formats: Format of each file.
        missing: Sizes of the model that no configuration states.
    """

    read: Job | None
    tables: Mapping[str, Any]
    sources: Mapping[str, str]
    reasons: Mapping[str, str]
    ignored: Sequence[str] = ()
    formats: Sequence[str] = ()
    missing: Sequence[str] = ()

    @property
    def mapped(self) -> dict[str, Any]:
        """Values that a configuration states, by key of the job (``model.layers``)."""
        return {key: reduce(getitem, key.split("."), self.tables) for key in self.sources}

    @property
    def assumed(self) -> dict[str, Any]:
        """Values that no configuration states, by key of the job."""
        return {key: reduce(getitem, key.split("."), self.tables) for key in self.reasons}

    @property
    def job(self) -> Job:
        """The job.

        Raises:
            JobError: If the configurations do not state all sizes of the model.
        """
        if self.read is None:
            rule = "name the file that does, as a model's config.json, or give the values"
            raise JobError(f"no configuration states {', '.join(self.missing)}: {rule}")
        return self.read

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        tables = {name: dict(getattr(self, name)) for name in ("mapped", "assumed", "sources", "reasons")}
        return tables | {name: list(getattr(self, name)) for name in ("ignored", "formats", "missing")}

    def to_toml(self) -> str:
        """A job file, with where each value comes from."""
        comments = {key: f"from {words}" for key, words in self.sources.items()}
        comments |= {key: f"assumed: {why}" for key, why in self.reasons.items()}
        return toml_text(self.tables, comments)


def _read_file(path: Path, draft: Draft, given: Given) -> str:
    """Read one file into the draft; the name of its format."""
    file = ConfigFile.open(path, given)
    named, form = format_of(file)
    if form is None or form.read is None:
        known = ", ".join(name for name, form in CONFIG_FORMATS.items() if form.read)
        shown = ", ".join(map(str, list(file.tables)[:8])) or "nothing"
        raise JobError(f"{path} must be a configuration of {known}, got tables {shown:.120}")
    try:
        form.read(file, draft)
        if wrong := [key for key in draft.values if key not in DEFAULTS and not str(key).startswith("run.")]:
            raise JobError(f"format {named} must map keys of a job, as model.seq_len, got {wrong[0]!r:.80}")
    except JobError as error:
        raise JobError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    return named


def read_configs(paths: str | Path | Sequence[str | Path], given: Given | None = None) -> ConfigJob:
    """Read a job from configuration files: one that states the model, and others that state how it is trained.

    Nothing is executed: scripts and Python files are parsed.

    Args:
        paths: One or several configuration files of Megatron-LM, torchtitan, Hugging Face, DeepSpeed, Accelerate,
            Nanotron, MaxText, NeMo or Megatron-Bridge, or a job file; later files override earlier ones.
        given: Values that no file states, or that override the files: ``Given(values={"cluster.nodes": 16})``.

    Returns:
        The job (``.job``), and what was ``mapped``, ``assumed`` and ``ignored``.

    Raises:
        JobError: If a file cannot be read or recognised, or no job follows.

    Example:
        >>> read_configs([Path("pretrain_gpt.sh")]).job  # doctest: +SKIP
    """
    given = given or Given()
    files = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    if not files:
        raise JobError("a configuration must be named, got none")
    draft = Draft()
    formats = tuple([_read_file(path, draft, given) for path in files])
    for what, value, users in (("pick", given.pick, _SEVERAL), ("define", given.variables, _SCRIPTS)):
        if value and {*formats} <= {*_BUILT_IN}.difference(users):
            of = f"{', '.join(map(str, files))} ({', '.join(formats)})"
            raise JobError(f"{what} is for formats {', '.join(users)}, got {value!r:.80} for {of}: leave it out")
    try:
        for key, value in given.values.items():
            if key == "framework":
                draft.choose(value, "given")
            elif key not in DEFAULTS:
                raise JobError(f"a value must be given for a key of a job, as model.seq_len, got {key!r:.80}")
            else:
                draft.map(key, value, "given")
        whole = draft.get("model.name") is not None
        missing = [f"model.{name}" for name in _NEEDED if not whole and draft.get(f"model.{name}") is None]
        if not missing:
            _fill_cluster(draft, given)
            _fill_batch(draft)
        for key in [key for key in draft.values if key.startswith("run.")]:
            draft.drop(key)
        for name, words in draft.settings.items():  # of a key that a later file, or the user, set again
            if not draft.names(name):
                draft.ignore(f"{words}: sets no key of this job")
        tables: dict[str, Any] = {"framework": draft.framework} if draft.framework else {}
        tables |= {name: table for name, table in draft.tables.items() if table}
        job = None if missing else Job.from_dict(tables)
    except JobError as error:
        raise JobError(f"{', '.join(map(str, files))}: {error}") from None
    return ConfigJob(job, tables, draft.sources, draft.reasons, tuple(draft.ignored), formats, tuple(missing))


def _fill_cluster(draft: Draft, given: Given) -> None:
    """Set the number of devices: that of the run, or the largest that the degrees and the batch allow."""
    draft.assume("cluster.hardware", HARDWARE, "no configuration states the hardware: give it")
    draft.assume("cluster.devices_per_node", DEVICES_PER_NODE, "no configuration states the devices of a node")
    if "cluster.nodes" in given.values:
        return
    per_node, stated = _positive(draft.get("cluster.devices_per_node")), draft.get("cluster.nodes")
    others = draft.degree("tp") * draft.degree("cp") * draft.degree("pp")
    least, reason = _least_devices(draft, others)
    total, micro = draft.get("batch.global_batch"), _positive(draft.get("batch.micro_batch", 1))
    replicas = draft.get("run.replicas", 0)  # that the batch implies
    devices = draft.get("run.devices") or replicas * others or (stated * per_node if isinstance(stated, int) else 0)
    held, because, wanted = bool(devices) and devices % least == 0, "", least

    def shares(count: int) -> bool:
        """Whether the replicas of so many devices share the stated global batch evenly."""
        return not isinstance(total, int) or total % max(1, count // others * micro) == 0

    if held and devices >= least and shares(devices):
        wanted, reason = devices, f"the run has {devices} devices"
        because = "run.devices" if draft.get("run.devices") else "run.replicas"
    elif draft.get("parallel.dp") is None:
        most = devices if held else math.lcm(least, per_node)
        counts = [*range(most, max(0, most - least * _MOST_TRIED), -least), least]
        wanted = next(n for n in counts if n == least or (n % least == 0 and shares(n)))
        can = "share the global batch" if held else f"hold {reason}"
        reason = f"{devices} devices cannot {can}" if devices else f"{reason} in whole nodes"
    if stated is not None and stated * per_node == wanted:
        return
    reason = f"{wanted} devices are needed: {reason}"
    if wanted % per_node:
        if "cluster.devices_per_node" in given.values:
            return
        per_node = math.gcd(wanted, per_node)
        draft.drop("cluster.devices_per_node")
        draft.assume("cluster.devices_per_node", per_node, reason, because)
    draft.drop("cluster.nodes")
    draft.assume("cluster.nodes", wanted // per_node, reason, because)


def _positive(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else DEVICES_PER_NODE


def _least_devices(draft: Draft, others: int) -> tuple[int, str]:
    """The smallest number of devices for the parallel degrees, and the degrees in words."""
    words = [f"{name} {draft.degree(name)}" for name in ("tp", "cp", "pp") if draft.degree(name) > 1]
    replicas, ep = draft.get("parallel.dp"), draft.degree("ep")
    if isinstance(replicas, int) and replicas > 0:
        words.append(f"dp {replicas}")
    else:
        group = draft.degree("cp") * (draft.degree("tp") if draft.get("parallel.expert_tp") == 1 else 1)
        replicas = math.lcm(ep // math.gcd(ep, group), draft.get("parallel.dp_shard") or 1)
        words += [f"dp {replicas} (ep {ep})"] if replicas > 1 else []
    return others * replicas, " * ".join(words) or "one replica"


def _fill_batch(draft: Draft) -> None:
    """Set what is missing of the batch, and how many times the pipeline is flushed."""
    pp, devices = draft.degree("pp"), math.prod(_positive(draft.get(f"cluster.{key}")) for key in _CLUSTER)
    dp = draft.get("parallel.dp") or max(1, devices // (draft.degree("tp") * draft.degree("cp") * pp))
    names = ("replicas_of_shards", "accumulation", "local_batch")
    copies, steps, local = (draft.get(f"run.{name}", 0) for name in names)
    if copies > 1 and dp % copies == 0:
        reason = f"{copies} copies of the shards in dp {dp}"
        draft.assume("parallel.dp_shard", dp // copies, reason, "run.replicas_of_shards")
    total = draft.get("batch.global_batch")
    if isinstance(total, int) and steps:
        reason = f"global_batch {total} over dp {dp} and {steps} micro-batches"
        draft.assume("batch.micro_batch", max(1, total // (dp * steps)), reason, "run.accumulation")
    draft.assume("batch.micro_batch", 1, "no configuration states a micro-batch")
    micro = _positive(draft.get("batch.micro_batch"))
    if local:
        reason = f"{local} sequences of each of dp {dp} replicas"
        draft.assume("batch.global_batch", local * dp, reason, "run.local_batch")
    count = steps or max(1, pp)
    reason = f"no configuration states a global batch: micro_batch {micro} * dp {dp} * {count} micro-batches"
    draft.assume("batch.global_batch", micro * dp * count, reason, "run.accumulation")
    draft.assume("batch.precision", "bf16", "no configuration states a precision")
    total, flush = draft.get("batch.global_batch"), draft.get("run.flush_batch", 0) * dp
    if pp > 1 and flush and isinstance(total, int) and total >= 2 * flush:
        reason = f"{total // flush} times {flush // dp} sequences of each of dp {dp} replicas"
        draft.assume("batch.flushes", total // flush, reason, "run.flush_batch")
