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
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stepsight.dataset.base.caching import cached
from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.documents import facts, flat, read_python
from stepsight.dataset.configs.drafts import ConfigFile, Draft
from stepsight.dataset.job.job import ModelSpec

_SUFFIXES = ("_flex_attn", "_varlen_attn", "_flex", "_varlen", "_irope")  # of flavors that differ in attention alone
MOST_DEPTH = 20  # of functions that build on each other
_CALLED = "_called"  # key of a call's name in the table of its keyword arguments
_ACTIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}
_NO_ATTENTION = re.compile("DeltaNet|Mamba|LinearAttention").search  # in names of a model's parts


@cached(1)
def flavors() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """Sizes of torchtitan's models by name and flavor, as keys of a job's model."""
    return {
        name: {
            flavor: {"family": "llama", **table.get("all", {}), **table[flavor]} for flavor in table if flavor != "all"
        }
        for name, table in facts()["torchtitan"].items()
    }


def flavor_sizes(name: str, flavor: str) -> dict[str, Any] | None:
    """Sizes of a flavor, as keys of a job's model; None if it is not known."""
    longest = max((family for family in flavors() if family in name), key=len, default="")
    for suffix in _SUFFIXES:
        flavor = flavor.removesuffix(suffix)
    found = flavors().get(longest or name, {}).get(flavor)  # experiments name theirs simple_fsdp.llama3, llama3_ft ...
    return None if found is None else dict(found)


def flavor_of(model: ModelSpec) -> tuple[str, str] | None:
    """Name and flavor whose sizes a model has; its vocabulary may be padded."""
    for name, flavor, sizes in ((name, *one) for name, table in flavors().items() for one in table.items()):
        exact = {"experts": 0, "attention": "mha", "tied_embeddings": False, **sizes, "gated_mlp": True}
        vocab = exact.pop("vocab")
        if 0 <= model.vocab - vocab < 1024 and all(getattr(model, key) == value for key, value in exact.items()):
            return name, flavor
    return None


def registry_settings(file: ConfigFile, draft: Draft) -> dict[str, Any]:
    """Settings of one function of a registry, by the names of torchtitan's TOML; its model's sizes fill a draft.

    Raises:
        JobError: If there is more than one and none is picked, or it states no known model.
    """
    evaluation, pick = _Evaluation(read_python(file.path)), file.given.pick
    returns = {name: ast.unparse(node.returns) for name, node in evaluation.functions.items() if node.returns}
    names = [name for name, text in returns.items() if name[0] != "_" and "Trainer.Config" in text]
    if not names:
        raise JobError("a Python registry must hold functions that return a Trainer.Config, got none")
    if pick not in names and (pick or len(names) != 1):
        got = f", got {pick!r:.80}" if pick else ""
        raise JobError(f"a registry holds several configurations: pick one of {', '.join(names)}{got}")
    config = evaluation.call(pick or names[0], 0)
    if not isinstance(config, dict):
        raise JobError(f"function {pick or names[0]} must return a configuration")
    spec = config.pop("model_spec", None)
    spec = spec if isinstance(spec, dict) else {}
    _model(file.path, pick or names[0], spec, draft)
    values = {key: value for key, value in flat(config).items() if not key.rpartition(".")[2].startswith("_")}
    mode = _named(facts()["torchtitan_code"]["recompute"], config.get("activation_checkpoint"))
    values |= {"activation_checkpoint.mode": "".join(mode) or "none", "activation_checkpoint.selective_ac_option": "op"}
    values["model.converters"] = (
        _named(facts()["torchtitan_code"]["converters"], *(spec.get("converters") or [])) or None
    )
    return values


def _named(words: Mapping[str, str], *called: Any) -> list[str]:
    """What the names of calls mean."""
    names = [str(call.get(_CALLED, "")) for call in called if isinstance(call, dict)]
    return [meant for name in names for word, meant in words.items() if word in name]


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
            found = self._value(statement, values, depth)
            if isinstance(statement, ast.Return):
                return found
        return None

    def _value(self, node: ast.AST | None, values: dict[str, Any], depth: int) -> Any:
        """The value of an expression; an assignment is run, and the body of a loop once (loops append to lists)."""
        match node:
            case ast.Return():
                return self._value(node.value, values, depth)
            case ast.Assign(targets=[target]) | ast.AnnAssign(target=target, value=ast.expr()):
                *outer, key = ast.unparse(target).split(".")
                table: Any = values
                for name in outer:
                    table = table.setdefault(name, {}) if isinstance(table, dict) else None
                if isinstance(table, dict):
                    table[key] = self._value(node.value, values, depth)
            case ast.For():
                for inner in node.body:
                    self._value(inner, values, depth)
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[item])):
                if isinstance(values.get(name), list):
                    values[name].append(self._value(item, values, depth))
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
            size = int((found.get("ffn_dim_multiplier") or 1) * int(8 * dim / 3)) if isinstance(dim, int) else None
            return None if size is None else -(-size // multiple) * multiple
        return {_CALLED: name, **found, **({"_arguments": places} if places else {})}


def _model(path: Path, function: str, spec: Mapping[str, Any], draft: Draft) -> None:
    """Sizes of the flavor that a configuration names: from the code beside the registry, else the known ones."""
    flavor, beside = str(spec.get("flavor") or (spec.get("_arguments") or [""])[0]), path.parent / "__init__.py"
    names = [path.resolve().parent.name, *(family for family in flavors() if function.startswith(family))]
    found = [(beside.name, _flavor_in_code(beside, flavor) if beside.is_file() else None)]
    found += [(name, flavor_sizes(name, flavor)) for name in names]
    source, sizes = next((pair for pair in found if pair[1] is not None), ("", None))
    if sizes is None:
        what = f"{beside} must state the sizes of flavor {flavor!r:.80} as arguments of calls: give them instead"
        put = f"the sizes of flavor {flavor!r:.80} are not known: put the model's __init__.py beside {path}"
        raise JobError(what if beside.is_file() else put)
    for key, value in sizes.items():
        draft.map(f"model.{key}", value, f"{source} {flavor}")


def _flavor_in_code(path: Path, flavor: str) -> dict[str, Any] | None:
    """Sizes of a flavor from keyword arguments of the calls in its function."""
    module = read_python(path)
    evaluation, name = _Evaluation(module), ""
    for node in ast.walk(module):
        if isinstance(node, ast.Name) and _NO_ATTENTION(node.id):
            raise JobError(f"a job has no layers with linear attention or state spaces, got {node.id} in {path}")
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
    sizes = facts()["torchtitan_code"]["sizes"]
    for key, item in items:
        if key in sizes and isinstance(item, bool | int) and not other:
            found.setdefault(sizes[key], item)
        elif isinstance(item, dict | list):
            _collect(item, found)
