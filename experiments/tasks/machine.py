"""What this machine has, and what works on it: libraries, devices, links, load."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from stepsight.dataset.base.errors import EXTRAS
from stepsight.dataset.harness.base.errors import HarnessError
from stepsight.dataset.harness.running.box import check_possible
from stepsight.dataset.harness.running.launch import busy_note
from stepsight.experiments.reports.text_table import table

_NVIDIA = ("name", "memory.total", "driver_version", "clocks.max.sm")
_NAMES = {"torch_geometric": "torch-geometric", "sqlalchemy": "SQLAlchemy"}


def check_machine() -> dict[str, Any]:
    """Look at this machine; takes about a second and changes nothing.

    Libraries have a version (None if absent) and the extra that brings them; ``quiet`` says why measurements would be
    bad, and ``can`` what works here, or else why not.
    """
    libraries = {name: {"version": _version(name), "extra": extra} for name, extra in EXTRAS.items()}
    gpus, box = list[dict[str, str]](), ""
    with suppress(OSError, subprocess.SubprocessError):  # GPUs of NVIDIA; none without its tool
        command = ["nvidia-smi", f"--query-gpu={','.join(_NVIDIA)}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20, check=True)
        lines = (map(str.strip, line.split(",")) for line in done.stdout.splitlines())
        gpus = [dict(zip(_NVIDIA, words, strict=False)) for words in lines]
    try:
        check_possible({})
    except HarnessError as error:
        box = str(error)
    absent = "" if libraries["torch"]["version"] else 'PyTorch is not installed: pip install "stepsight[collect]"'
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    lacking = [name for name, row in libraries.items() if row["version"] is None and row["extra"] == "train"]
    can = {
        "predict, explain, search, evaluate": "",
        f"collect on the CPU, up to {cores} ranks": absent,
        f"collect on GPUs ({len(gpus)} here)": absent or ("" if gpus else "no GPU was found"),
        "collect in a box": absent or box,
        "train": f'not installed: {", ".join(lacking)}: pip install "stepsight[train]"' if lacking else "",
    }
    return {
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "libraries": libraries,
        "cores": cores,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": gpus,
        "links": _links(),
        "quiet": busy_note(),
        "can": can,
    }


def _version(module: str) -> str | None:
    if find_spec(module) is None:
        return None
    try:
        return version(_NAMES.get(module, module))
    except PackageNotFoundError:
        return "installed"


def _links() -> list[dict[str, str]]:
    """InfiniBand ports and network interfaces that are up, with their rates."""
    ports = sorted(Path("/sys/class/infiniband").glob("*/ports/*"))
    found = [{"link": f"{p.parts[-3]} port {p.name}", "rate": _read(p / "rate") or "unknown"} for p in ports]
    for interface in sorted(Path("/sys/class/net").glob("*")):
        if interface.name != "lo" and _read(interface / "operstate") == "up":
            speed = _read(interface / "speed")
            known = speed.isdigit() and int(speed) > 0
            found.append({"link": interface.name, "rate": f"{speed} Mb/s" if known else "unknown"})
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace").strip()
    except OSError:
        return ""


def machine_text(told: dict[str, Any]) -> str:
    libraries = [[name, row["version"] or "not installed", row["extra"]] for name, row in told["libraries"].items()]
    can = [[what, "no" if why else "yes", why] for what, why in told["can"].items()]
    lines = [
        f"system     {told['system']}, {told['cores']} cores, {told['memory_bytes'] / 1e9:.1f} GB of memory",
        *(f"GPU        {', '.join(gpu.values())}" for gpu in told["gpus"]),
        *(f"link       {link['link']}: {link['rate']}" for link in told["links"]),
        f"quiet      {'no: ' + told['quiet'] if told['quiet'] else 'yes'}",
        "",
        table(["what works here", "", "why not"], can),
        "",
        table(["library", "version", "extra"], libraries),
    ]
    return "\n".join(lines)
