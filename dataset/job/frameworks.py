"""Defaults of training frameworks that a job or a table of runs does not state: a small declared profile for each.

A profile fills what is left open: ``framework = "..."`` in a job file, the column ``framework`` of a table of runs.
Below the profiles: what a job may state of its software: its container, its date, and versions of CUDA's libraries.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

from stepsight.dataset.base.caching import cached
from stepsight.dataset.base.errors import JobError
from stepsight.dataset.base.files import SUFFIXES, file_version, only_one, preset, read_facts
from stepsight.dataset.base.registry import Registry, instance_of
from stepsight.dataset.harness.base.parallel_rules import Rules
from stepsight.dataset.job.specs import CHOICES, RECOMPUTE, spec_from_table

SELECTIVE = ("attention", "every-2nd-layer")
ATTENTION = ("unfused", "flash-1", "flash-2", "flash-3")
_MONTH = "20[0-9]{2}-(?:0[1-9]|1[0-2])"
_OWN_CHOICES: dict[str, Collection[Any]] = {
    "selective": SELECTIVE, "attention": ATTENTION, "gradients": ("model", "model-fused", "fp32", "fp32-cast"),
    "p2p": ("full", "scattered"), "recompute": ("", *RECOMPUTE),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Framework:
    """Defaults of one framework.

    Fields without a comment mean what a job's tables mean by them; see ``_AS_THEY_ARE``.
    """

    name: str  # key in the presets
    words: tuple[str, ...] = ()  # parts of a name by which runs call it, lower case
    # The month from which the software did otherwise, as 2021-11.  A run is taken for this profile only if it states an
    # earlier date: a year, or a year and a month.  Empty: the profile needs no date.
    until: str = ""
    source: str = ""  # where this is known from, with a date
    # Whose kernels, autograd and optimizer these are, as in ExecutionSpec; empty: not known, so that the default of the
    # precision is taken.
    engine: str = ""
    checkpoint: str = ""
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = False
    bucket_mbytes: float = 25.0
    prefetch: int = 1
    reshard_after_forward: bool = True
    attention: str = "flash-2"  # one of ATTENTION: three ops with a score matrix, or a generation of fused kernels
    dropout: float = 0.0
    fused_optimizer: bool = True  # as fused of OptimizerSpec
    clip_grad_norm: bool = True
    vocab_multiple: int = 1  # the vocabulary is padded to a multiple of this times the tensor-parallel degree
    # Whether its usual recipes give each pipeline stage several chunks of the model, so that a run that says nothing of
    # virtual stages may have them or not.
    interleaves: bool = False
    # Whether a replica's batch is cut into as many micro-batches as there are pipeline ranks, and interleaved schedules
    # have two chunks a rank, where a run does not say.
    stage_micro_batches: bool = False
    sequence_parallel: bool = False  # norms are shared out with tensor parallelism where a run does not say
    recompute: str = ""  # what it does where a run does not say; empty: unknown
    recompute_modules: tuple[str, ...] = ()
    selective: str = "attention"  # what its selective recomputation comes closest to: one of SELECTIVE
    gradients: str = "model"  # as gradient_dtype of ParallelSpec, never empty
    reduce_scatter: bool = True
    zero_by_rank: bool = False
    context_parallel: str = "ring"
    runtime: str = ""
    p2p: str = "full"  # the activation that a rank passes to the next stage; scattered: a part, which is gathered there
    overlap_tp: str = ""
    overlap_ep: bool = False
    dispatcher: str = "alltoall"
    eager_kernels: bool = False
    separate_linears: bool = False
    norms_again: bool = False
    token_metrics: bool = False
    metric_losses: int = 0
    fp8_scaling: str = "delayed"
    fp8_parameters: bool = False
    fp8_attention: bool = False
    fp8_activations: bool = False
    dispatch_calls: float = 0.0
    op_calls: float = 1.0
    launch_blocking: bool = False
    fused_loss: bool = False
    fused_experts: bool = False
    loss_share: float = 1.0
    mean_tokens: int = 0  # tokens of a sequence of bert that are computed on average, if it is not shorter; 0: all
    hierarchical: bool = False
    partial_rows: bool = True
    # By how much a month's later release changes the time, in log units, and the month for which the time holds that
    # follows from the profile.
    drift_log: float = 0.0
    drift_from: str = ""

    def __post_init__(self) -> None:
        allowed = {key.partition(".")[2]: words for key, words in CHOICES.items()} | _OWN_CHOICES
        for item in fields(self):
            value = getattr(self, item.name)
            for word in value if isinstance(value, tuple) else (value,):
                if word not in allowed.get(item.name, (word,)):
                    words = ", ".join(allowed[item.name])
                    raise JobError(f"framework {self.name}: {item.name} must be one of {words}, got {word!r:.80}")
        for key, holds, rule in (
            ("until", not self.until or re.fullmatch(_MONTH, self.until), "be a month as 2021-11"),
            (
                "drift_from",
                re.fullmatch(_MONTH if self.drift_log else "", self.drift_from),
                "be a month",
            ),
            ("loss_share", 0 < self.loss_share <= 1, "lie in (0, 1]"),
            ("mean_tokens", self.mean_tokens >= 0, "be >= 0"),
            ("vocab_multiple", self.vocab_multiple >= 1, "be >= 1"),
            ("bucket_mbytes", self.bucket_mbytes > 0, "be > 0"),
        ):
            if not holds:
                raise JobError(f"framework {self.name}: {key} must {rule}, got {getattr(self, key)!r:.80}")

    @property
    def fused_attention(self) -> bool:
        """Whether attention keeps no score matrix."""
        return self.attention != "unfused"

    @property
    def of(self) -> str:
        """The software that it was read from, in a few words."""
        return re.split(r"[(:,;]", self.source)[0].strip()

    def runtime_of(self, pp: int, virtual_stages: int) -> str:
        """The runtime that passes pipeline messages, as in ``ParallelSpec.runtime``."""
        return self.runtime if pp > 1 and virtual_stages == 1 else ""

    def fill(self, tables: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """The tables of a job, completed with this framework's defaults.

        What they state goes before, but for a vocabulary, which is padded, and selective recomputation, which becomes
        what the framework means by it.  Doing it twice changes nothing more.
        """
        model, parallel = dict(tables.get("model", {})), dict(tables.get("parallel", {}))
        stated = (parallel.get(key) for key in ("tp", "pp", "virtual_stages"))  # the job's rules report invalid ones
        tp, pp, chunks = (value if type(value) is int and value > 0 else 1 for value in stated)
        recompute = parallel.setdefault("recompute", self.recompute or "none")
        if recompute == "selective" and self.selective == "every-2nd-layer":
            parallel |= {"recompute": "full", "recompute_every": 2}
        fused = model.setdefault("fused_attention", self.fused_attention)
        vocab, multiple = model.get("vocab"), self.vocab_multiple * tp
        if type(vocab) is int and model.get("family") != "vit":
            model["vocab"] = -(-vocab // multiple) * multiple
        habits = {name: {key: getattr(self, key) for key in keys} for name, keys in _AS_THEY_ARE.items()}
        habits["model"] |= {
            "attention_kernels": self.attention if fused and self.fused_attention else "",
            "norms_again": self.norms_again and recompute != "full",
        }
        length = model.get("seq_len")
        if model.get("family") == "bert" and type(length) is int:
            unpadded = self.mean_tokens if length > self.mean_tokens else 0
            habits["model"] |= {"loss_share": self.loss_share, "unpadded_len": unpadded}
        habits["parallel"] |= {
            "sequence_parallel": tp > 1 and self.sequence_parallel,
            "recompute_modules": self.recompute_modules if recompute == "selective" else (),
            "gradient_dtype": self.gradients,
            "runtime": self.runtime_of(pp, chunks),
            "scatter_p2p": self.p2p == "scattered",
        }
        habits["optimizer"]["fused"] = self.fused_optimizer
        whole = {**tables, "model": model, "parallel": parallel}
        return {name: {**habits.get(name, {}), **whole.get(name, {})} for name in {**whole, **habits}}


# Fields that a job's tables have under the same names.
_AS_THEY_ARE = {name: keys.split() for name, keys in preset("job_facts.toml")["habits"].items()}


GENERIC = Framework(name="generic", source="PyTorch's own defaults: what a run of an unknown framework is taken for")


def framework_from_dict(name: str, table: Mapping[str, Any]) -> Framework:
    """A profile from a preset's table."""
    built, problems = spec_from_table(f"framework.{name}", Framework, {**table, "name": name})
    if problems:
        raise JobError(Rules(problems).text())
    return built  # type: ignore[no-any-return]


FRAMEWORKS: Registry[Framework] = Registry(
    "framework",
    lambda: {n: framework_from_dict(n, told) for n, told in preset("frameworks.toml").items()} | {"generic": GENERIC},
    group="stepsight.frameworks",
    check=instance_of(Framework),
    more="a .json or .toml file",
)


def find_framework(text: str, container: str = "", date: str = "") -> Framework:
    """The profile that a job names: by its name, by a file, or the first one with a word in the text.

    ``container`` and ``date``, as in ``ExecutionSpec``, choose among the profiles of a framework; files have one.
    """
    if text.endswith(SUFFIXES):
        return _read_profile(text, file_version(text))
    if (found := _profile_in(text, container, date)) is None:
        raise JobError(FRAMEWORKS.unknown(text))
    return found


def framework_in(text: str, container: str = "", date: str = "") -> Framework:
    """The profile of a run that others measured and described; ``GENERIC`` if no profile matches."""
    return _profile_in(text, container, date) or GENERIC


def _profile_in(text: str, container: str, date: str) -> Framework | None:
    text, when = text.lower(), date or release_month(container)
    if text in FRAMEWORKS and not (container or when):
        return FRAMEWORKS[text]  # other packages need not be loaded, and one of them may be asking while it is loaded
    FRAMEWORKS.load()
    named = FRAMEWORKS[text] if text in FRAMEWORKS else _by_words(f"{text} {when}", FRAMEWORKS.version)[0]
    if not (container or when) or (text and named is None):
        return named
    closer, word = _by_words(f"{text} {when} {container.lower()}", FRAMEWORKS.version)
    # A profile of the same software, as "nemo:26.06" is of "nemo": other words belong to what the container also has.
    return closer if named is None or any(own in word for own in named.words) else named


@cached(1024)
def _by_words(text: str, version: int) -> tuple[Framework | None, str]:
    """The first profile with a word in a text, and the word; ``version``: of the registry, for the cache."""
    date = re.search(rf"(?<![0-9]){_MONTH}|(?<![0-9])20[0-9]{{2}}(?![0-9])", text)
    for profile in FRAMEWORKS.values():
        held = not profile.until or (date is not None and date[0] < profile.until)
        for word in profile.words if held else ():  # not as a part of another one; a version number may follow it
            if re.search(rf"(?<![a-z]){re.escape(word)}(?![a-z])", text):
                return profile, word
    return None, ""


@cached(64)
def _read_profile(path: str, version: tuple[int, int]) -> Framework:
    """The profile in a file; ``version`` makes the cache read a changed file again."""
    try:
        profiles = {name: framework_from_dict(name, table) for name, table in read_facts(path).items()}
    except JobError as error:
        raise JobError(f"{path}: {error}") from None
    return only_one(profiles, "profile", path)


def unknown_frameworks(names: Iterable[str]) -> str:
    """A warning about runs whose framework no profile knows; empty if there are none."""
    unknown = [f"{name!r:.80}" for name in names if name not in ("", GENERIC.name) and framework_in(name) is GENERIC]
    rest = f"{GENERIC.name}, PyTorch's own defaults, is taken (known: {', '.join(FRAMEWORKS.names())})"
    return f"no profile knows framework {', '.join(unknown)}: {rest}" if unknown else ""


LIBRARIES = ("cuda", "cublas", "nccl")
_DATE = r"20[0-9]{2}(-[0-9]{2}(-[0-9]{2})?)?"
_VERSION = r"[0-9]+(\.[0-9]+){0,3}(([-+]|rc|a|b)[a-z0-9.]+)?"
# Tags of NVIDIA's containers, as in nvcr.io/nvidia/nemo:24.07 or pytorch:23.10-py3: year and month of the release.
_TAG = re.compile(r"(?<![0-9.])(2[0-9])\.(0[1-9]|1[0-2])(?![0-9])")


def release_month(container: str) -> str:
    """The month in a container's tag, as ``2024-07`` of ``nvcr.io/nvidia/nemo:24.07``; empty if it has none."""
    found = _TAG.search(container)
    return f"20{found[1]}-{found[2]}" if found else ""


def software_problems(stated: dict[str, str]) -> list[str]:
    """Rules that stated software breaks: ``date`` and the versions of ``LIBRARIES``; empty: not stated."""
    problems = [
        f"{name} must be a version as 12.4, got {stated[name]!r:.80}"
        for name in LIBRARIES
        if stated[name] and not re.fullmatch(_VERSION, stated[name])
    ]
    date, right = stated["date"], False
    with suppress(ValueError):  # no such day
        right = not date or bool(re.fullmatch(_DATE, date) and datetime.date.fromisoformat(f"{date}-01-01"[:10]))
    if not right:
        problems.append(f"date must be a year, a month or a day, as 2024-07, got {date!r:.80}")
    return problems


def plain_version(text: str) -> str:
    """A version without its library's name: ``2.21.5`` of ``NCCL 2.21.5`` and of ``v2.21.5``."""
    return re.sub(rf"^({'|'.join(LIBRARIES)})?[-_ =]*v?(?=[0-9])", "", text.strip(), flags=re.IGNORECASE)


def version_numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, to compare with others: ``(2, 27, 3)`` of ``2.27.3``."""
    return tuple(map(int, re.findall(r"[0-9]+", version)))


def attention_of(text: str) -> str:
    """One of ``ATTENTION``: what a library's name and version mean, as ``flash-attn 2.5.8`` or ``cuDNN 9.1``."""
    for pattern, generation in preset("job_facts.toml")["attention"]:
        found = re.match(rf"(?<![a-z]){pattern}(?![a-z])", text.strip().lower())
        if found:
            return str(generation.format(*found.groups()))
    rule = "unfused, FlashAttention 1 to 3 (flash-attn 2.5.8), cuDNN 9 or later, sdpa or triton"
    raise JobError(f"attention must be {rule}, got {text!r:.80}")
