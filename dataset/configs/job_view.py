"""A job for a writer of a configuration: keys that the writer reads count as expressed, and the others are listed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from stepsight.dataset.base.errors import JobError, shorten
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.models import MODELS
from stepsight.dataset.job.specs import SECTIONS

# Facts about machines, frameworks and models' names, which no configuration of a framework states.
_NOT_ASKED = (
    "cluster.hardware", "cluster.fabric", "model.name", "execution.engine", "execution.checkpoint",
    "execution.dispatch_calls", "execution.container", "execution.date", "execution.cuda", "execution.cublas",
    "execution.nccl",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ConfigText:
    """A configuration that was written from a job.

    Attributes:
        text: Of the file.
        suffix: Suffix for the file's name.
        ignored: Keys that the framework cannot express, as ``key = value``.
        notes: What the user must do besides.
    """

    text: str
    suffix: str
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class JobView:
    """Values of a job by key (``model.layers``), and which of them were read."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._read: set[str] = set()
        self._refused: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        section, _, name = key.partition(".")
        self._read.add(key)
        return self._vocabulary()[0] if key == "model.vocab" else getattr(getattr(self.job, section), name)

    def _vocabulary(self) -> tuple[int, int]:
        """The vocabulary, without padding if the model's name tells it, and the multiple that it is padded to."""
        model = self.job.model
        try:
            profile = self.job.profile
        except JobError:  # a file that is gone
            profile = None
        multiple = 1 if profile is None else profile.vocab_multiple * self.job.parallel.tp
        if model.family == "vit" or model.vocab % multiple:
            return model.vocab, 1
        known = MODELS.get(model.name, {}).get("vocab", 0)
        return (known if -(-known // multiple) * multiple == model.vocab else model.vocab), multiple

    def notes(self) -> tuple[str, ...]:
        """Notes about a written vocabulary that the job's framework pads."""
        (size, multiple), job = self._vocabulary(), self.job
        if "model.vocab" not in self._read or multiple == 1:
            return ()
        pads = f"to a multiple of {multiple}, as {job.framework} does with tp {job.parallel.tp}"
        if size != job.model.vocab:
            return (
                f"the vocabulary of {size} is that of {job.model.name}; the job's {job.model.vocab} is padded {pads}",
            )
        if MODELS.get(job.model.name, {}).get("vocab") == size:
            return ()
        return (f"the vocabulary of {size} is padded {pads}: write the tokenizer's own size if that is smaller",)

    def expressed(self, *keys: str) -> None:
        """Mark keys as expressed because other keys imply them."""
        self._read.update(keys)

    def unexpressed(self, *keys: str) -> None:
        """Mark keys as not expressed, even if they were read or have their default."""
        self._refused.update(keys)

    def copy(self, pairs: Mapping[str, str]) -> dict[str, Any]:
        """Values of a configuration by name, from a table of configuration name to job key."""
        return {name: self[key] for name, key in pairs.items()}

    def stage_layers(self) -> list[int]:
        """Layers of each part of the model: as stated, or even; the first parts take the remainder."""
        parallel, layers = self.job.parallel, self.job.model.total_layers
        self._read.add("parallel.stage_layers")
        parts = parallel.pp * parallel.virtual_stages
        each, rest = divmod(layers, parts)
        return list(parallel.stage_layers) or [each + (part < rest) for part in range(parts)]

    def image(self) -> tuple[int, int]:
        """Sides of a patch and of a square image of three channels; what gives no square is not expressed."""
        patch, image = round((self["model.patch_dim"] / 3) ** 0.5), round(max(0, self["model.seq_len"] - 1) ** 0.5)
        if 3 * patch**2 != self.job.model.patch_dim:
            self.unexpressed("model.patch_dim")
        if image**2 + 1 != self.job.model.seq_len:
            self.unexpressed("model.seq_len")
        return patch, patch * image

    def left(self) -> tuple[str, ...]:
        """Keys that are not expressed, with their values; unread keys with their default are left out."""
        found = []
        for section, spec in SECTIONS.items():
            for item in fields(spec):
                key, value = f"{section}.{item.name}", getattr(getattr(self.job, section), item.name)
                default = None if item.default is MISSING else item.default
                dropped = key not in self._read and key not in _NOT_ASKED and value != default
                if dropped or key in self._refused:
                    found.append(f"{key} = {shorten(value, 80)}")
        return tuple(found)
