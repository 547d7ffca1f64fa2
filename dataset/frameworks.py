"""What training frameworks do that a table of runs does not say: a small declared profile for each.

A profile fills what a run leaves open: its fields go into the ``Job``.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import Any

from stepsight.dataset.errors import JobError
from stepsight.dataset.specs import FP8_SCALING, OVERLAP_TP, RUNTIMES

SELECTIVE = ("attention", "every-2nd-layer")
GRADIENTS = ("model", "fp32", "fp32-cast")
P2P = ("full", "scattered")
ATTENTION = ("unfused", "flash-1", "flash-2", "flash-3")


@dataclass(frozen=True, kw_only=True, slots=True)
class Framework:
    """Habits of one framework.

    Attributes:
        name: Key in the presets.
        words: Parts of a name by which runs call it, lower case.
        source: Where this is known from, with a date.
        overlap_grad_reduce, overlap_param_gather, bucket_mbytes, prefetch, reshard_after_forward: As in
            ``ParallelSpec``.
        attention: One of ``ATTENTION``: three ops with a score matrix, or a generation of fused kernels (``flash-3``:
            cuDNN's too).
        dropout: As in ``ModelSpec``.
        fused_optimizer, clip_grad_norm: As in ``OptimizerSpec``.
        vocab_multiple: Tables of the vocabulary are padded to a multiple of this times the tensor-parallel degree.
        sequence_parallel: Whether norms are shared out wherever tensor parallelism is on and a run does not say.
        recompute: What it does where a run does not say; empty: unknown.
        selective: What its selective recomputation comes closest to: one of ``SELECTIVE``.
        gradients: As ``gradient_dtype`` of ``ParallelSpec``, never empty.
        reduce_scatter: As in ``ParallelSpec``.
        runtime: As in ``ParallelSpec``: who passes messages between stages.
        p2p: Whether tensor-parallel ranks pass the ``full`` activation on to the next stage, or each a
            ``scattered`` part that is gathered there.
        overlap_tp: As in ``ParallelSpec``.
        eager_kernels, norms_again, token_metrics: As in ``ModelSpec``.
        fp8_scaling: As in ``BatchSpec``.
    """

    name: str
    words: tuple[str, ...] = ()
    source: str = ""
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = False
    bucket_mbytes: float = 25.0
    prefetch: int = 1
    reshard_after_forward: bool = True
    attention: str = "flash-2"
    dropout: float = 0.0
    fused_optimizer: bool = True
    clip_grad_norm: bool = True
    vocab_multiple: int = 1
    sequence_parallel: bool = False
    recompute: str = ""
    selective: str = "attention"
    gradients: str = "model"
    reduce_scatter: bool = True
    runtime: str = ""
    p2p: str = "full"
    overlap_tp: str = ""
    eager_kernels: bool = False
    norms_again: bool = False
    token_metrics: bool = False
    fp8_scaling: str = "delayed"

    def __post_init__(self) -> None:
        for key, value, allowed in (
            ("selective", self.selective, SELECTIVE),
            ("gradients", self.gradients, GRADIENTS),
            ("runtime", self.runtime, ("", *RUNTIMES)),
            ("overlap_tp", self.overlap_tp, OVERLAP_TP),
            ("fp8_scaling", self.fp8_scaling, FP8_SCALING),
            ("p2p", self.p2p, P2P),
            ("attention", self.attention, ATTENTION),
        ):
            if value not in allowed:
                raise JobError(f"framework {self.name}: {key} must be one of {', '.join(allowed)}, got {value!r}")
        if self.vocab_multiple < 1 or not self.bucket_mbytes > 0:
            raise JobError(
                f"framework {self.name}: vocab_multiple must be >= 1 and bucket_mbytes > 0, got "
                f"{self.vocab_multiple} and {self.bucket_mbytes}"
            )

    @property
    def fused_attention(self) -> bool:
        """Whether attention keeps no score matrix."""
        return self.attention != "unfused"


GENERIC = Framework(name="generic", source="PyTorch's own defaults: what a run of an unknown framework is taken for")


def framework_from_dict(name: str, table: dict[str, Any]) -> Framework:
    """A profile from a preset's table."""
    known = {field.name for field in fields(Framework)} - {"name"}
    unknown = set(table) - known
    if unknown:
        raise JobError(
            f"framework {name} has unknown keys {', '.join(sorted(unknown))} (known: {', '.join(sorted(known))})"
        )
    return Framework(**{"name": name, **table, "words": tuple(table.get("words", ()))})


@cache
def _presets() -> dict[str, Framework]:
    text = resources.files("stepsight.dataset").joinpath("presets/frameworks.toml").read_text("utf-8")
    return {name: framework_from_dict(name, table) for name, table in tomllib.loads(text).items()}


def framework_names() -> tuple[str, ...]:
    """Names of the presets, in the order in which their words are looked for."""
    return tuple(_presets())


def find_framework(text: str) -> Framework:
    """The first preset of that name or of which a word stands in the text; ``GENERIC`` if there is none."""
    lower = text.lower()
    presets = _presets()
    if lower in presets:
        return presets[lower]
    return next((f for f in presets.values() if any(word in lower for word in f.words)), GENERIC)
