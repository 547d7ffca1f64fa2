"""torchtitan's models: sizes by name and flavor, and its Python config registry, which is read and never executed.

A registry (2026) holds functions that return ``Trainer.Config(...)`` or change what another one returns.  The sizes of
a flavor stand in the ``__init__.py`` beside it, as keyword arguments of calls.  Source: torchtitan
``models/*/__init__.py`` and ``model/args.py``, 2024-07 to 2026-02.  ``ffn`` is what ``ffn_dim_multiplier`` and
``multiple_of`` give.
"""

from __future__ import annotations

import ast
import copy
import operator
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.documents import flat, read_python
from stepsight.dataset.configs.drafts import ConfigFile, Draft
from stepsight.dataset.job.job import ModelSpec


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **more: Any) -> dict[str, Any]:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": ffn}
    return {"family": "llama", "vocab": 128256, **sizes, **more}


def _experts(count: int, used: int, inner: int, shared: int = 0) -> dict[str, Any]:
    return {"experts": count, "experts_per_token": used, "expert_ffn": inner, "shared_experts": shared}


def _latent(layers: int, hidden: int, heads: int, ffn: int, q_lora_rank: int, **more: Any) -> dict[str, Any]:
    ranks = {"q_lora_rank": q_lora_rank, "kv_lora_rank": 512, "head_dim": 128, "rope_head_dim": 64, "v_head_dim": 128}
    return _llama(layers, hidden, heads, heads, ffn, attention="mla", **ranks, **{"vocab": 102400, **more})


_qwen = partial(_llama, head_dim=128, vocab=151936)
_TIED = {"tied_embeddings": True}
_DEBUG = {"vocab": 2048}
FLAVORS: Mapping[str, Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "llama2": {
            "debugmodel": _llama(8, 256, 16, 16, 768, vocab=32000),
            "7B": _llama(32, 4096, 32, 32, 11008, vocab=32000),
            "13B": _llama(40, 5120, 40, 40, 13824, vocab=32000),
            "26B": _llama(80, 5120, 40, 40, 13824, vocab=32000),
            "70B": _llama(80, 8192, 64, 8, 28672, vocab=32000),
        },
        "llama3": {
            "debugmodel": _llama(6, 256, 16, 16, 768, **_DEBUG),
            "1B": _llama(16, 2048, 32, 8, 8192, **_TIED),
            "3B": _llama(28, 3072, 24, 8, 8192, **_TIED),
            "8B": _llama(32, 4096, 32, 8, 14336),
            "70B": _llama(80, 8192, 64, 8, 28672),
            "405B": _llama(126, 16384, 128, 8, 53248),
        },
        "llama4": {
            "debugmodel": _llama(6, 256, 16, 16, 768, moe_every=2, **_experts(8, 1, 512, 1), **_DEBUG),
            "17bx16e": _llama(48, 5120, 40, 8, 16384, vocab=202048, **_experts(16, 1, 8192, 1)),
            "17bx128e": _llama(48, 5120, 40, 8, 16384, vocab=202048, moe_every=2, **_experts(128, 1, 8192, 1)),
        },
        "deepseek_v3": {
            "debugmodel": _latent(6, 256, 16, 1024, 0, dense_layers=1, **_experts(8, 3, 256, 2), **_DEBUG),
            "16B": _latent(27, 2048, 16, 10944, 0, dense_layers=1, **_experts(64, 6, 1408, 2)),
            "236B": _latent(60, 5120, 128, 12288, 1536, dense_layers=1, **_experts(160, 6, 1536, 2)),
            "671B": _latent(61, 7168, 128, 18432, 1536, vocab=129280, dense_layers=3, **_experts(256, 8, 2048, 1)),
        },
        "qwen3": {
            "debugmodel": _qwen(8, 256, 16, 8, 3072, **_DEBUG, **_TIED),
            "debugmodel_moe": _qwen(8, 256, 16, 8, 3072, **_DEBUG, **_experts(64, 8, 768)),
            "0.6B": _qwen(28, 1024, 16, 8, 3072, **_TIED),
            "1.7B": _qwen(28, 2048, 16, 8, 6144, **_TIED),
            "4B": _qwen(36, 2560, 32, 8, 9728, **_TIED),
            "8B": _qwen(36, 4096, 32, 8, 12288),
            "14B": _qwen(40, 5120, 40, 8, 17408),
            "32B": _qwen(64, 5120, 64, 8, 25600),
            "30B-A3B": _qwen(48, 2048, 32, 4, 6144, **_experts(128, 8, 768)),
            "235B-A22B": _qwen(94, 4096, 64, 4, 12288, **_experts(128, 8, 1536)),
        },
        "gpt_oss": {
            "debugmodel": _llama(4, 256, 64, 8, 2880, head_dim=64, vocab=201088, **_experts(8, 4, 2880)),
            "20b": _llama(24, 2880, 64, 8, 2880, head_dim=64, vocab=201088, **_experts(32, 4, 2880)),
            "120b": _llama(36, 2880, 64, 8, 2880, head_dim=64, vocab=201088, **_experts(128, 4, 2880)),
        },
    }
)
_SUFFIXES = ("_flex_attn", "_varlen_attn", "_flex", "_varlen", "_irope")  # of flavors that differ in attention alone
MOST_DEPTH = 20  # of functions that build on each other
_CALLED = "_called"  # key of a call's name in the table of its keyword arguments
_ACTIONS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
_NO_ATTENTION = re.compile("DeltaNet|Mamba|LinearAttention").search  # in names of a model's parts
# Keyword arguments of a flavor's calls, and the keys of a job's model.
_SIZES = {
    "n_layers": "layers",
    "dim": "hidden",
    "n_heads": "heads",
    "n_kv_heads": "kv_heads",
    "head_dim": "head_dim",
    "hidden_dim": "ffn",
    "dense_hidden_dim": "ffn",
    "vocab_size": "vocab",
    "moe_hidden_dim": "expert_ffn",
    "num_experts": "experts",
    "num_shared_experts": "shared_experts",
    "router_top_k": "experts_per_token",
    "top_k": "experts_per_token",
    "n_dense_layers": "dense_layers",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "head_dim",
    "qk_rope_head_dim": "rope_head_dim",
    "v_head_dim": "v_head_dim",
    "enable_weight_tying": "tied_embeddings",
}


def flavor_sizes(name: str, flavor: str) -> dict[str, Any] | None:
    """Sizes of a flavor, as keys of a job's model; None if it is not known."""
    longest = max((family for family in FLAVORS if family in name), key=len, default="")
    for suffix in _SUFFIXES:
        flavor = flavor.removesuffix(suffix)
    found = FLAVORS.get(longest or name, {}).get(flavor)  # experiments name theirs simple_fsdp.llama3, llama3_ft ...
    return None if found is None else dict(found)


def flavor_of(model: ModelSpec) -> tuple[str, str] | None:
    """Name and flavor whose sizes a model has; its vocabulary may be padded."""
    for name, flavors in FLAVORS.items():
        for flavor, sizes in flavors.items():
            exact = {"experts": 0, "attention": "mha", "tied_embeddings": False, **sizes, "gated_mlp": True}
            vocab = exact.pop("vocab")
            same = all(getattr(model, key) == value for key, value in exact.items())
            if same and 0 <= model.vocab - vocab < 1024:
                return name, flavor
    return None


def registry_settings(file: ConfigFile, draft: Draft) -> dict[str, Any]:
    """Settings of one function of a registry, by the names of torchtitan's TOML; its model's sizes fill a draft.

    Raises:
        JobError: If there is more than one and none is picked, or it states no known model.
    """
    evaluation, pick = _Evaluation(read_python(file.path)), file.given.pick
    names = [
        name
        for name, node in evaluation.functions.items()
        if name[0] != "_" and node.returns and "Trainer.Config" in ast.unparse(node.returns)
    ]
    if pick not in names and (pick or len(names) != 1):
        got = f", got {pick!r:.80}" if pick else ""
        raise JobError(f"a registry holds several configurations: pick one of {', '.join(names)}{got}")
    config = evaluation.call(pick or names[0], 0)
    if not isinstance(config, dict):
        raise JobError(f"function {pick or names[0]} must return a configuration")
    spec = config.pop("model_spec", None)
    spec = spec if isinstance(spec, dict) else {}
    _model(file.path, pick or names[0], spec, draft)
    return _settings(config, spec)


class _Evaluation:
    """Values of simple statements of a module: assignments, calls with keyword arguments, attributes, arithmetic."""

    def __init__(self, module: ast.Module) -> None:
        self.functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
        self._constants: dict[str, Any] = {}
        for node in module.body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name), *_], value=ast.Constant(value=value)):
                    self._constants[name] = value

    def call(self, name: str, depth: int, given: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """What a function returns, with some arguments (by name) and the defaults of the others.

        Raises:
            JobError: If calls are nested too deeply.
        """
        if depth > MOST_DEPTH:
            raise JobError(f"functions of a registry must build on each other at most {MOST_DEPTH} times")
        words, body = self.functions[name].args, self.functions[name].body
        last = words.args[len(words.args) - len(words.defaults) :]
        pairs = [*zip(last, words.defaults, strict=True), *zip(words.kwonlyargs, words.kw_defaults, strict=True)]
        defaults = {word.arg: node.value for word, node in pairs if isinstance(node, ast.Constant)}
        values: dict[str, Any] = {**self._constants, **defaults, **given}
        for statement in body:
            if isinstance(statement, ast.Return) and statement.value is not None:
                return self._value(statement.value, values, depth)
            self._carry_out(statement, values, depth)
        return None

    def _carry_out(self, statement: ast.stmt, values: dict[str, Any], depth: int) -> None:
        """Run an assignment, or the body of a loop once (loops append to lists)."""
        match statement:
            case ast.Assign(targets=[target]) | ast.AnnAssign(target=target, value=ast.expr()):
                *outer, key = ast.unparse(target).split(".")
                table: Any = values
                for name in outer:
                    table = table.setdefault(name, {}) if isinstance(table, dict) else None
                if isinstance(table, dict):
                    table[key] = self._value(statement.value, values, depth)
            case ast.For():
                for inner in statement.body:
                    self._carry_out(inner, values, depth)
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[item])):
                if isinstance(values.get(name), list):
                    values[name].append(self._value(item, values, depth))

    def _value(self, node: ast.AST | None, values: dict[str, Any], depth: int) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return values.get(node.id)
            case ast.ListComp():
                return [self._value(node.elt, values, depth)]
            case ast.IfExp():
                first = self._value(node.body, values, depth)
                return self._value(node.orelse, values, depth) if first is None else first
            case ast.List() | ast.Tuple():
                return [self._value(item, values, depth) for item in node.elts]
            case ast.Attribute():
                table = self._value(node.value, values, depth)
                return table.get(node.attr) if isinstance(table, dict) else None
            case ast.BinOp() if type(node.op) in _ACTIONS:
                left, right = self._value(node.left, values, depth), self._value(node.right, values, depth)
                if all(isinstance(number, int | float) and abs(number) < 2**40 for number in (left, right)):
                    return _ACTIONS[type(node.op)](left, right) if right else None
            case ast.Call():
                return self._called(node, values, depth)
        return None

    def _called(self, node: ast.Call, values: dict[str, Any], depth: int) -> Any:
        name = ast.unparse(node.func)
        found = {word.arg: self._value(word.value, values, depth) for word in node.keywords if word.arg}
        places = [self._value(item, values, depth) for item in node.args]
        if name in self.functions:
            names = [word.arg for word in self.functions[name].args.args]
            value = copy.deepcopy(self.call(name, depth + 1, {**dict(zip(names, places, strict=False)), **found}))
            whole = not found or (isinstance(value, dict) and str(value.get(_CALLED)).endswith("Trainer.Config"))
            return value if whole else {_CALLED: name, **found, "_returned": value}
        if name == "int" and len(places) == 1:
            return int(places[0]) if isinstance(places[0], int | float) else None
        if name.rpartition(".")[2] == "compute_ffn_hidden_dim":
            dim, multiple = places[0] if places else found.get("dim"), found.get("multiple_of") or 1
            if not isinstance(dim, int):
                return None
            size = int(8 * dim / 3)
            size = int((found.get("ffn_dim_multiplier") or 1) * size)
            return -(-size // multiple) * multiple
        return {_CALLED: name, **found, **({"_arguments": places} if places else {})}


def _model(path: Path, function: str, spec: Mapping[str, Any], draft: Draft) -> None:
    """Sizes of the flavor that a configuration names: from the code beside the registry, else the known ones."""
    flavor, beside = str(spec.get("flavor") or (spec.get("_arguments") or [""])[0]), path.parent / "__init__.py"
    sizes, source = (_flavor_in_code(beside, flavor) if beside.is_file() else None), f"{beside.name} {flavor}"
    for name in (path.resolve().parent.name, *(family for family in FLAVORS if function.startswith(family))):
        if sizes is None:
            sizes, source = flavor_sizes(name, flavor), f"{name} {flavor}"
    if sizes is None:
        what = f"{beside} must state the sizes of flavor {flavor!r:.80} as arguments of calls: give them instead"
        put = f"the sizes of flavor {flavor!r:.80} are not known: put the model's __init__.py beside {path}"
        raise JobError(what if beside.is_file() else put)
    for key, value in sizes.items():
        draft.map(f"model.{key}", value, source)


def _flavor_in_code(path: Path, flavor: str) -> dict[str, Any] | None:
    """Sizes of a flavor from keyword arguments of the calls in its function."""
    module = read_python(path)
    evaluation, name = _Evaluation(module), ""
    for node in ast.walk(module):
        if isinstance(node, ast.Name) and _NO_ATTENTION(node.id):
            raise JobError(f"a job has no layers with linear attention or state spaces, got {node.id} in {path.name}")
        for key, value in zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ():
            if isinstance(key, ast.Constant) and key.value == flavor and isinstance(value, ast.Name):
                name = name or value.id
    if name not in evaluation.functions:
        return None
    found: dict[str, Any] = {}
    _collect(evaluation.call(name, 0), found)
    if not {"layers", "hidden", "heads"} <= set(found) or not {"ffn", "expert_ffn"} & set(found):
        return None
    if "kv_lora_rank" in found:
        found |= {"attention": "mla", "kv_heads": found["heads"]}
    if found.get("experts") and "ffn" in found:
        found.setdefault("expert_ffn", found["ffn"])
    return {"family": "llama", **found}


def _collect(value: Any, found: dict[str, Any]) -> None:
    """Gather the sizes in the tables of calls; the first of a name counts."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    other = isinstance(value, dict) and str(value.get(_CALLED, "")).endswith(("RoPE.Config", "Embedding.Config"))
    for key, item in items:
        if key in _SIZES and isinstance(item, bool | int) and not other:
            found.setdefault(_SIZES[key], item)
        elif isinstance(item, dict | list):
            _collect(item, found)


def _settings(config: Mapping[str, Any], spec: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration's values by the names of torchtitan's TOML."""
    values = {key: value for key, value in flat(config).items() if not key.rpartition(".")[2].startswith("_")}
    policy = config.get("activation_checkpoint")
    recompute = str(policy.get(_CALLED, "")) if isinstance(policy, dict) else ""
    modes = {"FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "memory_budget"}
    values["activation_checkpoint.mode"] = next((mode for word, mode in modes.items() if word in recompute), "none")
    values["activation_checkpoint.selective_ac_option"] = "op"
    converters = [str(item.get(_CALLED, "")) for item in spec.get("converters") or [] if isinstance(item, dict)]
    names = {"Float8": "float8", "MXFP8": "mx", "NVFP4": "nvfp4"}
    values["model.converters"] = [name for text in converters for word, name in names.items() if word in text]
    return values
