"""Facts about the software that runs a job: its container, its date, and versions of CUDA's libraries."""

from __future__ import annotations

import re

from stepsight.dataset.base.errors import JobError

LIBRARIES = ("cuda", "cublas", "nccl")
_DATE = r"20[0-9]{2}(-(0[1-9]|1[0-2])(-[0-3][0-9])?)?"
_VERSION = r"[0-9]+(\.[0-9]+){0,3}(([-+]|rc|a|b)[a-z0-9.]+)?"
# Tags of NVIDIA's containers, as in nvcr.io/nvidia/nemo:24.07 or pytorch:23.10-py3: year and month of the release.
_TAG = re.compile(r"(?<![0-9.])(2[0-9])\.(0[1-9]|1[0-2])(?![0-9])")

# Generations of attention kernels by the words of libraries, in the order in which they are tried.  cuDNN 9 is as quick
# as FlashAttention-3 (Shah et al. 2024, section 4.1); llm-foundry's "triton" is the first FlashAttention; PyTorch's
# scaled_dot_product_attention has FlashAttention-2 since 2.2 (its release notes, January 2024).
_ATTENTION = (
    (r"unfused|eager|math|none", "unfused"),
    (r"flash[-_ ]?(?:attention|attn)?[-_ ]*v?([123])(?![0-9])", "flash-{}"),
    (r"fa[-_ ]?([123])(?![0-9])", "flash-{}"),
    (r"cudnn(?![-_ ]*v?[0-8](?![0-9]))", "flash-3"),
    (r"triton", "flash-1"),
    (r"sdpa", "flash-2"),
)


def release_month(container: str) -> str:
    """The month in a container's tag, as ``2024-07`` of ``nvcr.io/nvidia/nemo:24.07``; empty if it has none."""
    found = _TAG.search(container)
    return f"20{found[1]}-{found[2]}" if found else ""


def software_problems(stated: dict[str, str]) -> list[str]:
    """Rules that stated software breaks.

    Args:
        stated: ``date`` and the versions of ``LIBRARIES``; empty: not stated.
    """
    problems = [
        f"{name} must be a version as 12.4, got {stated[name]!r:.80}"
        for name in LIBRARIES
        if stated[name] and not re.fullmatch(_VERSION, stated[name])
    ]
    if stated["date"] and not re.fullmatch(_DATE, stated["date"]):
        problems.append(f"date must be a year or a month as 2024-07, got {stated['date']!r:.80}")
    return problems


def plain_version(text: str) -> str:
    """A version without its library's name: ``2.21.5`` of ``NCCL 2.21.5`` and of ``v2.21.5``."""
    return re.sub(rf"^({'|'.join(LIBRARIES)})?[-_ =]*v?(?=[0-9])", "", text.strip(), flags=re.IGNORECASE)


def version_numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, to compare with others: ``(2, 27, 3)`` of ``2.27.3``."""
    return tuple(map(int, re.findall(r"[0-9]+", version)))


def attention_of(text: str) -> str:
    """The generation of attention kernels that a library's name and version mean.

    Args:
        text: As ``flash-attn 2.5.8``, ``cuDNN 9.1``, ``unfused``.

    Returns:
        ``unfused``, ``flash-1``, ``flash-2`` or ``flash-3``.

    Raises:
        JobError: If the name or the version is unknown.
    """
    for pattern, generation in _ATTENTION:
        found = re.match(rf"(?<![a-z]){pattern}(?![a-z])", text.strip().lower())
        if found:
            return generation.format(*found.groups())
    raise JobError(
        "attention must be unfused, FlashAttention 1 to 3 (flash-attn 2.5.8), cuDNN 9 or later, sdpa or triton, "
        f"got {text!r:.80}"
    )
