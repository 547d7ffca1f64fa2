"""Words of the field for keys of files and answers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "compute": "Computation",
        "tp_communication": "Tensor-parallel communication",
        "cp_communication": "Context-parallel communication",
        "ep_communication": "Expert-parallel communication",
        "dp_communication": "Data-parallel communication",
        "pp_communication": "Pipeline messages",
        "host": "Host",
        "bubble": "Pipeline bubble",
        "parallel": "Strategy",
        "batch": "Batch",
        "parallel.tp": "Tensor parallel",
        "parallel.pp": "Pipeline stages",
        "parallel.cp": "Context parallel",
        "parallel.ep": "Expert parallel",
        "parallel.dp": "Data parallel",
        "parallel.zero_stage": "ZeRO stage",
        "parallel.dp_shard": "Shards of a hybrid-sharded replica",
        "parallel.schedule": "Pipeline schedule",
        "parallel.recompute": "Recomputation",
        "parallel.bucket_mbytes": "Gradient bucket, MB",
        "batch.micro_batch": "Micro-batch, sequences",
        "batch.global_batch": "Global batch, sequences",
        "model.name": "Model",
        "model.hidden": "Hidden size",
        "model.seq_len": "Sequence length, tokens",
        "model.ffn": "Inner size of the MLP",
        "model.kv_heads": "Key-value heads",
        "cluster.nodes": "Nodes",
        "cluster.devices_per_node": "Devices of a node",
        "cluster.hardware": "Device",
        "cluster.fabric": "Links",
        "cluster.fabric.inter_node.bandwidth_gbytes_per_s": "Bandwidth between nodes, GB/s per device",
        "cluster.fabric.inter_node.latency_us": "Latency between nodes, µs",
        "cluster.fabric.intra_node.bandwidth_gbytes_per_s": "Bandwidth within a node, GB/s per device",
        "memory_gb": "Memory, GB",
        "waiting_for_peers": "Waiting for other ranks",
        "host_bound": "Launches of the host",
        "waiting_for_communication": "Exposed communication",
    }
)


def words(key: str) -> str:
    """A key as people say it: ``ZeRO stage`` for ``parallel.zero_stage``."""
    return _WORDS.get(key) or key.rpartition(".")[2].replace("_", " ").capitalize()


def shown(value: Any) -> str:
    """A value as people write it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value)) or "-"
    return "-" if value is None or value == "" else str(value)
