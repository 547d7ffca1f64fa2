"""A rank's device: clocks, temperature and power while something is measured; memory; the machine's identity.

``nvidia-smi`` runs beside the harness from beginning to end, several times a second, and changes nothing.  Where it
is absent, or says nothing, nothing is known.  It writes to a pipe that this process reads: if this process is
gone, however it ended, the next sample ends it too.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import re
import statistics
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

TOOL = "nvidia-smi"
_FIELDS = dict(sm_mhz="clocks.sm", memory_mhz="clocks.mem", temperature_c="temperature.gpu", power_w="power.draw")
_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")  # the second one: older drivers
_EVERY_MS = 200
_PIPED: dict[str, Any] = {"stdin": subprocess.DEVNULL, "text": True, "errors": "replace"}
_REASON_NAMES = {
    0x1: "idle", 0x2: "application_clocks", 0x4: "power_cap", 0x8: "hardware_slowdown", 0x10: "sync_boost",
    0x20: "thermal", 0x40: "hardware_thermal", 0x80: "hardware_power_brake", 0x100: "display_clocks",
}  # fmt: skip


class Sample(NamedTuple):
    """Values read at one time: numbers by name, and why the clock was not higher."""

    numbers: dict[str, float]
    reasons: tuple[str, ...]


def parse(line: str) -> Sample | None:
    """One line of values separated by commas, in the order that ``Watch`` asks for; none if it holds no number."""
    words = [word.strip() for word in line.split(",")]
    named = zip(_FIELDS, words, strict=False)
    numbers = {name: float(word) for name, word in named if re.fullmatch(r"-?\d+(\.\d+)?", word)}  # else not supported
    mask = int(next((word for word in words[len(_FIELDS) :] if re.fullmatch(r"0x[\da-fA-F]+", word)), "0"), 16)
    return Sample(numbers, tuple(name for bit, name in _REASON_NAMES.items() if mask & bit)) if numbers else None


def clocks(ranks: Iterable[list[Sample]]) -> dict[str, Any]:
    """``{"clocks": {"samples": how many, "sm_mhz": {"median", "least"}, ..., "reasons": {reason: share}}}``.

    Of all ranks' GPUs together; empty if there is no sample.
    """
    samples = [Sample(*sample) for of in ranks for sample in of]  # from other ranks they come as lists
    if not samples:
        return {}
    found: dict[str, Any] = {"samples": len(samples)}
    for name in _FIELDS:
        if values := [sample.numbers[name] for sample in samples if name in sample.numbers]:
            found[name] = {"median": statistics.median(values), "least": min(values)}
    counts = Counter(reason for sample in samples for reason in sample.reasons)
    found["reasons"] = {reason: round(count / len(samples), 3) for reason, count in sorted(counts.items())}
    return {"clocks": found}


def _query(gpu: str, fields: Iterable[str]) -> list[str]:
    return [TOOL, f"--id={gpu}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]


def ask(gpu: str, *fields: str) -> list[str]:
    """Ask ``nvidia-smi`` for fields of a GPU; empty if it cannot answer."""
    try:
        done = subprocess.run(_query(gpu, fields), capture_output=True, timeout=20, check=False, **_PIPED)
    except (OSError, subprocess.SubprocessError):
        return []
    lines = done.stdout.splitlines()
    return [word.strip() for word in lines[0].split(",")] if done.returncode == 0 and lines else []


class Watch:
    """Samples of one GPU from now on, by its UUID with ``GPU-`` before it, or by its number."""

    def __init__(self, gpu: str) -> None:
        self._samples: list[tuple[float, Sample]] = []
        self._process: subprocess.Popen[str] | None = None
        fields = list(_FIELDS.values())
        reasons = [name for name in _REASONS if ask(gpu, name)][:1]
        if not reasons and not ask(gpu, fields[0]):
            return
        command = [*_query(gpu, [*fields, *reasons]), "-lms", str(_EVERY_MS)]
        with suppress(OSError):
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, **_PIPED)
            self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
            self._reader.start()

    def _read(self, lines: IO[str]) -> None:
        with lines:
            for sample in filter(None, map(parse, lines)):
                self._samples.append((time.monotonic(), sample))

    def since(self, begin: float) -> list[Sample]:
        """Return the samples that came after ``begin`` (monotonic seconds)."""
        return [sample for when, sample in list(self._samples) if when >= begin]

    def stop(self) -> None:
        """Stop sampling."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._reader.join()


def free_memory() -> None:
    """Free unreferenced objects, including models in reference cycles."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


# Returns the host's free memory to the system, where the C library can: glibc has it.
malloc_trim: Callable[[int], object] = getattr(ctypes.CDLL(None), "malloc_trim", abs)


def out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error means that memory ran out, also in a library's own words."""
    told = any(words in str(error) for words in ("out of memory", "ALLOC_FAILED"))
    return told or isinstance(error, torch.OutOfMemoryError)


def gpu_name(device: torch.device) -> str:
    """Return the name by which ``nvidia-smi`` knows a GPU, whatever the order of GPUs in this process."""
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    name = f"GPU-{uuid.removeprefix('GPU-')}"
    alone = torch.cuda.device_count() == 1 and "CUDA_VISIBLE_DEVICES" not in os.environ
    return "0" if alone and not ask(name, "clocks.sm") else name


def memory_bytes(device: torch.device) -> int:
    """Memory of a GPU, or of this machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def fingerprint(device: torch.device) -> dict[str, Any]:
    """Return the properties of the machine that times depend on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text("utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    facts: dict[str, Any] = {
        "device": "cpu",
        "machine": platform.machine(),
        "system": platform.system(),
        "processor": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "memory_bytes": memory_bytes(device),
        "torch": torch.__version__,
        "threads_per_rank": torch.get_num_threads(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "device": properties.name,
            "num_processors": properties.multi_processor_count,
            "cache_bytes": int(getattr(properties, "L2_cache_size", 0)),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
        if driver := ask(gpu_name(device), "driver_version"):
            facts["driver"] = driver[0]
    return facts
