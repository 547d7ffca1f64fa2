"""What ran a row: its words for devices, networks and software as presets, links and a framework's profile.

``dataset/presets/megatron_bridge.csv`` states what Megatron-Bridge's recipes do with mixtures of experts that its
tables of results do not say.  It has a line for each release in which a recipe of pre-training changed, from
``scripts/performance/configs`` of the tags 0.2.0 to 0.5.0 (Apache-2.0), which the project's performance summary names
as what it ran: the dispatcher (``moe_flex_dispatcher_backend``), overlap of all-to-alls (``moe_a2a_overlap``), CUDA
graphs (``cuda_graph_impl``: ``parts`` of a layer around the dispatch, or the ``whole`` iteration, then with fused
experts) and recomputed modules.  Releases are named by their containers.
"""

from __future__ import annotations

import csv
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from typing import Any, TypeVar

from stepsight.dataset.base.caching import cached
from stepsight.dataset.hardware.hardware import fabric_names, find_fabric, find_hardware, hardware_names, usual_fabric
from stepsight.dataset.job.frameworks import FRAMEWORKS, Framework, attention_of, framework_in, release_month
from stepsight.experiments.evaluation.runs_table import Row, RowError, number_in

# Words that may stand beside a device's without making it another one.
_REMARKS = re.compile(r"nvidia|tesla|gpus?|tensor|core|hgx|dgx|nvl72|superchip|sxm[0-9]?|pcie|hbm[0-9]e?")
_MEMORY = re.compile(r"([0-9]{1,4}) ?gb\b")
_PORTS = re.compile(r"(?:(\d+) ?x ?)?(\d+) ?g(?:b/s|bps|bit/s|b)\b")
T = TypeVar("T")


@cached(1)
def told() -> dict[str, Any]:
    """What rows say in words, and what they leave out: ``dataset/presets/published_rows.toml``."""
    return tomllib.loads(
        resources.files("stepsight.dataset").joinpath("presets/published_rows.toml").read_text("utf-8")
    )


def preset_of_device(row: Row) -> str:
    """The preset of a row's devices."""
    text = row.text("hardware")
    if find_hardware(text) is not None:
        return text
    lower = text.lower()
    main = re.sub(r"\(.*?\)", " ", lower).split(",")[0]  # the rest are remarks
    stated, memory = _MEMORY.search(main), row.whole("gpu_mem_gb")
    if stated is not None and memory not in (None, int(stated[1])):
        raise RowError(f"hardware {text!r:.60} and gpu_mem_gb state different memories")
    memory = memory or (int(stated[1]) if stated else None)
    said = set(re.findall("[a-z0-9]+", _MEMORY.sub(" ", main))) | ({"pcie"} if "pcie" in lower else set())
    known = [words for words, _, _ in told()["devices"] if " " not in words]
    for words, usual, kind in told()["devices"]:
        if said.issuperset(words.split()) and all(map(_REMARKS.fullmatch, said - set(words.split()))):
            name = f"{kind}-{memory or usual}gb"
            if find_hardware(name) is not None:
                return name
            known = [other for other in hardware_names() if other.startswith(f"{kind}-")]
            break
    named = repr(text[:60]) if text else "an unnamed device"
    raise RowError(f"no hardware preset for {named}{f' of {memory} GB' if memory else ''} (known: {', '.join(known)})")


def fabric_of(row: Row, hardware: str, gpus_per_node: int) -> Any:
    """A preset's name, or links from the ports that the row states; otherwise the usual fabric of the devices."""
    text, usual = row.text("inter_interconnect"), usual_fabric(hardware)
    if text in fabric_names():
        return text
    lower, machine = text.lower(), row.text("hardware").lower()
    named = [fabric for word, device, fabric in told()["networks"] if word in lower and device in hardware]
    named += [fabric for word, fabric in told()["machines"] if word in machine]
    if named:
        return named[0]
    ports = _PORTS.search(lower)
    if ports is None:
        return usual
    gbits = number_in(ports[2], "inter_interconnect") * number_in(ports[1] or "1", "inter_interconnect")
    per_device = gbits / 8 / (1 if "per gpu" in lower else gpus_per_node)
    within, between = find_fabric(usual).intra_node, find_fabric(usual).inter_node
    if per_device * 1e9 == between.bandwidth_bytes_per_s:
        return usual
    slower = 1.5 if "roce" in lower or "rdma" in lower else 1.0  # Ethernet's latency over InfiniBand's
    links = {
        "intra_node": (within.bandwidth_bytes_per_s / 1e9, within.latency_s),
        "inter_node": (per_device, between.latency_s * slower),
    }
    return {
        key: {"bandwidth_gbytes_per_s": gbytes_per_s, "latency_us": latency_s * 1e6}
        for key, (gbytes_per_s, latency_s) in links.items()
    }


def cluster_of(row: Row) -> dict[str, Any]:
    """The ``[cluster]`` table of a row's job.

    Nodes have as many GPUs as the row states or implies, 8 if it states nothing.  A partly used node is one node.
    """
    gpus, hardware = row.gpus, preset_of_device(row)
    nodes, per_node = row.whole("nodes"), row.whole("gpus_per_node")
    if nodes is None:
        per_node = 8 if per_node is None else per_node
    else:
        per_node = gpus // max(nodes, 1) if per_node is None else per_node
        if nodes * per_node != gpus and not (nodes == 1 and gpus < per_node):
            raise RowError(f"nodes * gpus_per_node must be gpus, got {nodes} * {per_node} != {gpus}")
    per_node = min(gpus, per_node)
    fabric = fabric_of(row, hardware, per_node)
    domain = told()["nvlink_domains"].get(fabric) if isinstance(fabric, str) else None
    if domain is not None:
        per_node = max(size for size in range(1, domain + 1) if gpus % size == 0)
    if per_node < 1 or gpus % per_node:
        raise RowError("gpus_per_node does not divide gpus")
    return {"hardware": hardware, "nodes": gpus // per_node, "devices_per_node": per_node, "fabric": fabric}


def framework_of(row: Row) -> Framework:
    """The profile of a row's framework; flags and precisions that the row states go before."""
    # The date of a run, or of a paper: it tells generations of a framework apart.
    source = re.sub(r"\bSC'?(\d\d)\b", r"20\1", row.text("source"))
    container = row.text("container")
    dates = row.text("date"), release_month(container), *re.findall(r"\b20\d\d\b", source)
    dated = " ".join(filter(None, dates))
    framework = framework_in(row.text("framework"), container, dated)
    changes: dict[str, Any] = {"attention": attention_of(row.text("attention"))} if row.text("attention") else {}
    for columns, words, fields in told()["stated"]:
        if re.search(words, " ".join(map(row.text, columns.split())).lower()):
            changes |= fields
    bucket = re.search(r"\bbucket_cap_mb=([0-9.]+)", row.notes)
    if bucket and number_in(bucket[1], "bucket_cap_mb") > 0:
        changes["bucket_mbytes"] = float(bucket[1])
    if framework.name == "paxml":
        changes["recompute"] = by_model(row, told()["paxml"]["recompute"], framework.recompute)
    if "nemo container" in row.software.lower() or "nemo:" in container.lower():
        changes |= _container_habits(row, framework)
    return replace(framework, **changes) if changes else framework


def _container_habits(row: Row, framework: Framework) -> dict[str, Any]:
    """What recipes of Megatron-Bridge do with a mixture; where none is known: with most on that hardware."""
    calls, changes = FRAMEWORKS["nemo"].dispatch_calls, dict[str, Any]()
    if framework.overlap_ep and "mxfp8" not in row.text("precision").lower():
        changes = {"overlap_ep": False, "fused_experts": False, "dispatch_calls": calls}
    recipe = find_recipe(row)
    if recipe is not None:
        return {**changes, "dispatch_calls": calls, **recipe_habits(recipe)}
    if row.text("hardware").lower().startswith("gb"):  # CUDA graphs of the router and what precedes the dispatch
        changes["dispatch_calls"] = 0.0
    return changes


def by_model(row: Row, values: Mapping[str, T], default: T) -> T:
    """The value for a row's model, by the start of its name without marks."""
    return next((value for start, value in values.items() if plain_name(row).startswith(start)), default)


def plain_name(row: Row) -> str:
    return re.sub("[^a-z0-9]", "", row.text("model_name").lower())


DEGREES = ("tp", "pp", "vp", "ep", "micro_batch")
FIRST = "25.11"  # release: before it, runs were with all-to-alls and limited capacity


@cached(1)
def recipes() -> tuple[dict[str, str], ...]:
    """Lines of the table of Megatron-Bridge, oldest first.

    Its columns: the ``release`` in which a recipe appeared; the beginning of a ``model``'s name without marks; a word
    of the ``device``; ``precisions``: ``bf16``, ``cs`` and ``sc`` (8 bits), ``mx`` (MXFP8) or ``nvfp4``; ``DEGREES``;
    the ``dispatcher``; ``overlap``: whether all-to-alls run beside another micro-batch; ``graphs``: ``none``, ``parts``
    or ``whole``; modules that it has to ``recompute``.
    """
    text = resources.files("stepsight.dataset").joinpath("presets/megatron_bridge.csv").read_text("utf-8")
    return tuple(sorted(csv.DictReader(text.splitlines()), key=lambda line: line["release"]))


def recipe_habits(recipe: Mapping[str, str]) -> dict[str, Any]:
    """Fields of a framework's profile that a recipe sets.

    Where graphs hold the router and what precedes the dispatch, and HybridEP sorts on the device, the host does no more
    than launch; so it is where the iteration is one graph.
    """
    graphs, dispatcher, modules = recipe["graphs"], recipe["dispatcher"], tuple(recipe["recompute"].split())
    free = graphs == "whole" or (graphs == "parts" and dispatcher == "hybridep")
    return {
        "dispatcher": dispatcher,
        "overlap_ep": recipe["overlap"] == "yes",
        "fused_experts": graphs == "whole",
        **({"dispatch_calls": 0.0} if free else {}),
        **({"recompute": "selective", "recompute_modules": modules} if modules else {}),
    }


def find_recipe(row: Row) -> dict[str, str] | None:
    """The recipe that a row is a run of: the one whose degrees are the row's, in its release or before."""
    container = re.search(r"\b(\d\d\.\d\d(?:\.\d\d)?)\b", row.software)
    release, model = container[1] if container else "", plain_name(row)
    kind = next((word for word in ("nvfp4", "bf16", "mx") if word in row.text("precision").lower()), "cs")
    device = re.sub("[^a-z0-9].*", "", row.text("hardware").lower())
    degrees = [str(row.whole(key) or 1) for key in DEGREES]
    alike = [line for line in recipes() if model.startswith(line["model"]) and device == line["device"]]
    same = [line for line in alike if kind in line["precisions"].split()] or alike
    if not same or release < FIRST:
        return None

    def fit(line: Mapping[str, str]) -> tuple[int, bool]:
        return sum(line[key] == own for key, own in zip(DEGREES, degrees, strict=True)), line["release"] <= release

    best = max(map(fit, same))
    newest_last = [line for line in same if fit(line) == best]
    return newest_last[-1] if best[1] else newest_last[0]
