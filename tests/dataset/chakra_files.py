"""Chakra execution traces of small made-up jobs, in protobuf and in both forms of JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NodeTable = dict[str, Any]


def two_products(rank: int = 0, slow: int = 1) -> list[NodeTable]:
    """Two calls that launch a product each, an all-reduce between them, and a wait of the host for it."""
    shapes = {"shapes": "[[512, 256], [256, 128]]", "types": "['Tensor(c10::Half)', 'Tensor(c10::Half)']"}
    gpu, comm = {"is_cpu_op": False, "stream": 7}, {"is_cpu_op": False, "stream": 20, "comm_type": 0, "comm_size": 4096}
    return [
        {"id": 2, "name": "aten::mm(0)", "type": 4, "us": 10, "deps": [], "attrs": {"is_cpu_op": True}, **shapes},
        {"id": 3, "name": "ampere_fp16_gemm", "type": 4, "us": 100 * slow, "deps": [2], "attrs": gpu},
        {"id": 4, "name": "c10d::allreduce_", "type": 7, "us": 5, "deps": [2], "attrs": {"is_cpu_op": True}},
        {"id": 5, "name": "ncclKernel_AllReduce", "type": 7, "us": 50, "deps": [4, 3], "attrs": comm},
        {"id": 6, "name": "cudaDeviceSynchronize", "type": 4, "us": 1, "deps": [4, 5], "attrs": {"is_cpu_op": True}},
        {"id": 7, "name": "aten::mm(1)", "type": 4, "us": 10, "deps": [6], "attrs": {"is_cpu_op": True}, **shapes},
        {"id": 8, "name": "ampere_fp16_gemm", "type": 4, "us": 100 * slow, "deps": [7], "attrs": gpu},
    ]


def protobuf(nodes: list[NodeTable]) -> bytes:
    """The nodes as messages, each after its length, with the metadata first."""
    return b"".join(_delimited(message) for message in [_bytes(1, b"0.0.4"), *map(_node, nodes)])


def jsonized(nodes: list[NodeTable]) -> str:
    """The nodes one after the other, as protobuf prints them."""
    names = ["INVALID_NODE", "METADATA_NODE", "MEM_LOAD_NODE", "MEM_STORE_NODE", "COMP_NODE", "COMM_SEND_NODE",
             "COMM_RECV_NODE", "COMM_COLL_NODE"]  # fmt: skip
    out = [json.dumps({"version": "0.0.4"})]
    for node in nodes:
        attrs = [
            {"name": name, "boolVal": value} if isinstance(value, bool) else {"name": name, "int64Val": str(value)}
            for name, value in node["attrs"].items()
        ]
        table = {"id": str(node["id"]), "name": node["name"], "type": names[node["type"]], "attr": attrs}
        table |= {"dataDeps": [str(dep) for dep in node["deps"]], "durationMicros": str(node["us"])}
        table["inputs"] = {"shapes": node.get("shapes", ""), "types": node.get("types", "")}
        out.append(json.dumps(table))
    return "\n".join(out)


def workload(nodes: list[NodeTable], ngpus: int = 1) -> str:
    """The nodes as a table with ``workload_graph``."""
    tables = [
        {"Id": node["id"], "Name": node["name"], "NodeType": node["type"], "data_deps": node["deps"],
         "runtime": node["us"], **node["attrs"]}
        for node in nodes
    ]  # fmt: skip
    return json.dumps({"workload_graph": tables, "ngpus": ngpus})


def write_ranks(folder: Path, slow: tuple[int, ...]) -> list[Path]:
    """A protobuf file for each rank."""
    folder.mkdir(exist_ok=True)
    paths = [folder / f"chakra.{rank}.et" for rank in range(len(slow))]
    for rank, path in enumerate(paths):
        path.write_bytes(protobuf(two_products(rank, slow[rank])))
    return paths


def _node(node: NodeTable) -> bytes:
    out = _number(1, node["id"]) + _bytes(2, node["name"].encode()) + _number(3, node["type"])
    out += b"".join(_number(5, dep) for dep in node["deps"]) + _number(7, node["us"])
    out += _bytes(8, _bytes(2, node.get("shapes", "").encode()) + _bytes(3, node.get("types", "").encode()))
    for name, value in node["attrs"].items():
        out += _bytes(10, _bytes(1, name.encode()) + _number(27 if isinstance(value, bool) else 9, int(value)))
    return out


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _delimited(value)


def _delimited(value: bytes) -> bytes:
    return _varint(len(value)) + value
