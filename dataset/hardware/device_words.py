"""Usual names of devices: ``H100``, ``A100-SXM4-80GB``, ``NVIDIA L4``."""

from __future__ import annotations

import re
from collections.abc import Mapping

_VENDORS = re.compile(
    r"^(nvidia|amd|intel|google|huawei|apple|tesla|instinct|geforce|habana|cloud)-|-(gpu|oam|server|tensor-core)$"
)


def device_words(name: str) -> str:
    """A name in lower case with dashes, without the vendor and the number of its socket."""
    words = re.sub(r"[^a-z0-9.]+", "-", name.strip().lower()).strip("-")
    before = ""
    while before != words:
        before, words = words, _VENDORS.sub("", words)
    words = re.sub(r"\bsxm\d\b", "sxm", words)
    words = re.sub(r"(\d)-gb\b", r"\1gb", words)
    return re.sub(r"\b(hbm\d?e?|gddr\d?x?|vram)\b-?", "", words).strip("-")


def preset_of(name: str, presets: Mapping[str, object], aliases: Mapping[str, str]) -> str:
    """The preset that a usual name means; otherwise the name itself."""
    words = device_words(name)
    if words in presets:
        return words
    if words in aliases:
        return aliases[words]
    found = [preset for preset in presets if set(words.split("-")) == set(preset.split("-"))]
    return found[0] if len(found) == 1 else name
