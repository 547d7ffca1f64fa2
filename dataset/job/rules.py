"""The rules of a job: each with its values, all reported at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.base.files import preset
from stepsight.dataset.base.registry import Registry, did_you_mean
from stepsight.dataset.hardware import hardware
from stepsight.dataset.harness.base import parallel_rules
from stepsight.dataset.harness.base.parallel_rules import Rules
from stepsight.dataset.job import specs
from stepsight.dataset.job.frameworks import LIBRARIES, software_problems
from stepsight.dataset.job.sharding import Ranks
from stepsight.dataset.job.sharding_plans import check_sharding, check_tables

# Larger numbers are typing mistakes.
MOST, MOST_LAYERS, MOST_DEVICES, MOST_ACTIONS, MOST_SLOWDOWN = 2**31, 10_000, 2**24, 2**20, 1000.0
MOST_SIZE, MOST_EXPERTS = 2**24, 2**16  # of a model's dimensions
MOST_ELEMENTS = 2**56  # of all parameters, and of an activation: with room for bytes and sums in 64 bits
_NO_DECODER = ("bert", "t5", "vit")
_FACTS = preset("job_facts.toml")
_SIZES = {key: (0, ">=") for key in _FACTS["not_negative"].split()} | {
    key: (1e-300, ">") for key in _FACTS["positive"].split()
}
_sizes_of, _numbers_of, _choices_of = map(lambda keys: attrgetter(*keys), (_SIZES, _FACTS["ranges"], specs.CHOICES))


@dataclass(frozen=True, kw_only=True)
class JobTables:
    """The tables of a job: what the rules read."""

    model: specs.ModelSpec
    parallel: specs.ParallelSpec
    batch: specs.BatchSpec
    optimizer: specs.OptimizerSpec = field(default_factory=specs.OptimizerSpec)
    cluster: specs.ClusterSpec
    execution: specs.ExecutionSpec = field(default_factory=specs.ExecutionSpec)
    sharding: specs.ShardingSpec = field(default_factory=specs.ShardingSpec)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches that each replica runs in an iteration."""
        return self.batch.global_batch // (self.batch.micro_batch * self.parallel.dp)

    @cached_property
    def table_ranks(self) -> Ranks:
        """The ranks that share the embedding tables, and what a byte costs them."""
        near, links = min(self.cluster.devices_per_node, self.parallel.dp), self.fabric
        facts = hardware.find_hardware(self.cluster.hardware)
        memory = facts.memory_bandwidth_bytes_per_s * facts.memory_efficiency if facts else 2e12
        # A core copies one after the other; of TCP, what is received slows what is sent (measured: recommendation.md).
        ranks, alone = self.parallel.dp, self.cluster.nodes == 1
        two_way = (1.0 if alone else ranks / max(1, 2 * ranks - 2)) if facts and facts.kind == "cpu" else 0.0
        return Ranks(
            ranks,
            near,
            self.batch.micro_batch,
            memory_s=1.0 / memory,
            near_s=1.0 / links.intra_node.bandwidth_bytes_per_s,
            far_s=1.0 / links.inter_node.bandwidth_bytes_per_s,
            sum_bytes=2 if self.batch.dtype in ("bf16", "fp16") else 4,
            memory_bytes=facts.memory_bytes if facts else 0.0,
            two_way=two_way,
        )

    @cached_property
    def fabric(self) -> hardware.Fabric:
        """The links of the cluster."""
        value = self.cluster.fabric or hardware.usual_fabric(self.cluster.hardware)
        return (
            hardware.find_fabric(value) if isinstance(value, str) else hardware.fabric_from_dict("custom", dict(value))
        )


def broken_rules(job: JobTables) -> Rules:
    """List the rules that a job breaks; later rules are checked only if the first ones hold."""
    rules = Rules()
    _sizes(rules, job)
    _choices(rules, job)
    for check in () if rules else (_elements, _degrees, _model, _lengths, _attention, _experts, _adapters, _tables):
        check(rules, job)
    for check in () if rules else (_pipeline, _cluster):
        check(rules, job)
    return rules


def _sizes(rules: Rules, job: JobTables) -> None:
    for (key, (least, sign)), value in zip(_SIZES.items(), _sizes_of(job), strict=True):
        most = MOST_LAYERS if key.endswith("layers") else MOST_SIZE if key.startswith("model.") else MOST
        if not least <= value <= most:
            rules.append(f"{key} must be {sign} 0 and <= {most}, got {value}")
    for (key, (low, high)), value in zip(_FACTS["ranges"].items(), _numbers_of(job), strict=True):
        rules.lies(key, value, low, high)
    devices = job.cluster.num_devices
    rules.require(devices <= MOST_DEVICES, f"nodes * devices_per_node must be <= {MOST_DEVICES}, got {devices}")


def _choices(rules: Rules, job: JobTables) -> None:
    from stepsight.dataset.job.schedules import SCHEDULES  # numpy: only once there is a job

    p = job.parallel
    for (key, allowed), value in zip(specs.CHOICES.items(), _choices_of(job), strict=True):
        for word in value if isinstance(value, tuple) else (value,):
            if word not in allowed:
                names = allowed.names() if isinstance(allowed, Registry) else allowed
                words = ", ".join(repr(known) if known == "" else str(known) for known in names)
                rules.append(f"{key} must be one of {words}, got {word!r:.80}{did_you_mean(word, names)}")
    if not p.schedule.endswith(".csv"):  # a file is checked when it is read
        kind, v = SCHEDULES.get(p.schedule), p.virtual_stages
        if kind is None:
            rules.append(f"parallel.{SCHEDULES.unknown(p.schedule)}")
        elif not kind.allows(v) and not p.pp == v == 1:
            rules.append(f"schedule {p.schedule} has virtual_stages {kind.allowed}, got {v}")
    stated = {name: getattr(job.execution, name) for name in ("date", *LIBRARIES)}
    if any(stated.values()):
        rules += [f"execution.{problem}" for problem in software_problems(stated)]
    rules.require(
        sorted(p.order.split("-")) == sorted(specs.AXES),
        f"parallel.order must name {', '.join(specs.AXES)} once each, joined by '-', got {p.order!r:.80}",
    )
    rules.require(bool(job.cluster.hardware), "cluster.hardware must name a device, got ''")
    try:
        for name in (job.cluster.hardware, *(other.hardware for other in job.cluster.mixed)):
            hardware.hardware_name(name)
        _ = job.fabric
    except JobError as error:
        rules.append(str(error))


def _elements(rules: Rules, job: JobTables) -> None:
    """Limit products of sizes that are allowed one by one: parameters, activations and attention scores."""
    m = job.model
    head = max(m.head_size + m.rope_head_dim, m.v_head_dim)
    experts = (m.experts + m.shared_experts) * m.expert_ffn
    width = max(m.hidden, m.ffn, m.vocab, m.patch_dim, m.q_lora_rank, m.kv_lora_rank, m.heads * head, experts)
    length, batch = max(m.seq_len, m.encoder_seq_len), job.batch.micro_batch
    tokens = batch * length * max(m.imbalance, m.capacity_factor, 1.0)
    for words, value in (
        ("layers * hidden * widest dimension", m.total_layers * m.hidden * width),
        ("micro_batch * seq_len * widest dimension", tokens * width),
        ("micro_batch * heads * seq_len * seq_len", batch * m.heads * length * length),
    ):
        rules.require(value <= MOST_ELEMENTS, f"{words} must be <= {MOST_ELEMENTS:.3g}, got {value:.3g}")


def _degrees(rules: Rules, job: JobTables) -> None:
    p, b = job.parallel, job.batch
    parallel_rules.check_degrees(rules, tp=p.tp, cp=p.cp, pp=p.pp, dp=p.dp, devices=job.cluster.num_devices)
    parallel_rules.check_batch(rules, micro_batch=b.micro_batch, dp=p.dp, global_batch=b.global_batch)
    rules.divides(b.flushes, "batch.flushes", job.num_micro_batches, "a replica's micro-batches")
    rules.divides(p.shards, "parallel.dp_shard", p.dp, "dp")
    rules.require(p.expert_tp in (0, 1, p.tp), f"parallel.expert_tp must be 1 or tp, got {p.expert_tp} with tp {p.tp}")
    group, words = (p.dp * p.cp * p.tp, "dp * cp * tp") if p.experts_tp < p.tp else (p.dp * p.cp, "dp * cp")
    rules.divides(p.ep, "parallel.ep", group, words)


def _model(rules: Rules, job: JobTables) -> None:
    m, p = job.model, job.parallel
    if not m.head_dim:
        rules.divides(m.heads, "model.heads", m.hidden, "hidden")
    rules.divides(m.kv_heads, "model.kv_heads", m.heads, "heads")
    for key in ("heads", "kv_heads", "ffn", *(["vocab"] if p.vocab_parallel and m.family != "vit" else [])):
        rules.divides(p.tp, "parallel.tp", getattr(m, key), f"model.{key}")
    for key, families in _FACTS["families"].items():
        value = attrgetter(key)(job)
        if m.family not in families and value != getattr(type(m), key.partition(".")[2]):
            rules.append(f"{key} is for {', '.join(families)} alone, got {value!s:.80} with {m.family}")
    for key, where in _FACTS["with"].items():
        other, _, wanted = where.partition(" = ")
        if attrgetter(other)(job) == wanted and attrgetter(key)(job) <= 0:
            rules.append(f"{key} must be > 0 with {where}, got {attrgetter(key)(job)}")


def _tables(rules: Rules, job: JobTables) -> None:
    m, p, kind = job.model, job.parallel, job.optimizer.kind
    if m.family != "dlrm":
        rules.require(
            kind not in specs.OTHER_OPTIMIZERS,
            f"optimizer.kind must be one of adam, adamw, got {kind!r:.80}, which is for dlrm, with family {m.family}",
        )
        return
    check_tables(rules, m)
    others = {"tp": p.tp, "cp": p.cp, "pp": p.pp, "ep": p.ep}
    rules.require(
        {*others.values()} == {1} and not p.zero_stage and p.recompute == "none",
        "dlrm is data-parallel beside its tables: tp, cp, pp and ep must be 1, zero_stage 0 and recompute none, got "
        f"{others}, {p.zero_stage} and {p.recompute!r:.40}",
    )
    if not rules:
        check_sharding(rules, m, job.sharding, job.table_ranks, job.cluster.hardware)


def _lengths(rules: Rules, job: JobTables) -> None:
    m, p = job.model, job.parallel
    rules.require(0 < m.loss_share <= 1, f"model.loss_share must lie in (0, 1], got {m.loss_share}")
    rules.lies("model.unpadded_len (of seq_len)", m.unpadded_len, 0, m.seq_len)
    for key in ("seq_len", *(["encoder_seq_len"] if m.family == "t5" else [])):
        length = getattr(m, key)
        if p.cp > 1:  # a causal mask is balanced by giving every rank two parts of the sequence
            causal = m.family not in ("bert", "vit") and key == "seq_len"
            parts, words = (2 * p.cp, "2 * cp") if causal else (p.cp, "cp")
            rules.require(
                length % parts == 0,
                f"context parallelism needs {words} to divide model.{key}, got {length} % {parts} = {length % parts}",
            )
        if p.sequence_parallel:
            parallel_rules.check_sequence(rules, key, length, tp=p.tp, cp=p.cp)


def _attention(rules: Rules, job: JobTables) -> None:
    m, p = job.model, job.parallel
    latent, mha = m.attention == "mla", m.attention != "mla"
    for holds, text in (
        (0 <= m.dropout < 1, f"model.dropout must lie in [0, 1), got {m.dropout}"),
        (
            m.fused_attention or not m.attention_kernels,
            f"model.attention_kernels are of fused attention, got {m.attention_kernels!r:.80} with fused_attention "
            "false",
        ),
        (
            m.fused_attention or p.cp == 1 or p.context_parallel == "all_gather",
            f"context_parallel {p.context_parallel!r} needs fused_attention, got fused_attention false with cp {p.cp}",
        ),
        (
            not p.offload_activations or p.recompute == "none",
            "activations are offloaded or recomputed: offload_activations needs recompute 'none', got "
            f"{p.recompute!r:.80}",
        ),
        (
            m.family != "llama" or latent or m.head_size % 2 == 0,
            f"rotary positions need an even model.head_dim, got {m.head_size}",
        ),
        (mha or m.family not in _NO_DECODER, f"attention 'mla' is for gpt and llama, got family {m.family!r:.80}"),
        (mha or m.kv_heads == m.heads, f"with attention 'mla' kv_heads = heads, got {m.kv_heads} and {m.heads} heads"),
    ):
        rules.require(holds, text)
    rules.lies("parallel.offload_layers (of the model's layers)", p.offload_layers, 0, m.total_layers)


def _experts(rules: Rules, job: JobTables) -> None:
    m, p = job.model, job.parallel
    if not m.experts:
        rules.require(p.ep == 1, f"parallel.ep > 1 needs model.experts, got ep {p.ep} with a dense model")
        return
    rules.require(m.family not in _NO_DECODER, f"model.experts are for gpt and llama, got family {m.family!r:.80}")
    rules.require(m.experts <= MOST_EXPERTS, f"model.experts must be <= {MOST_EXPERTS}, got {m.experts}")
    rules.lies("model.experts_per_token (of experts)", m.experts_per_token, 1, m.experts)
    rules.require(m.dense_layers <= m.layers, f"dense_layers <= layers, got {m.dense_layers} > {m.layers}")
    rules.divides(p.ep, "parallel.ep", m.experts, "model.experts")
    rules.divides(p.experts_tp, "parallel.expert_tp", m.expert_ffn, "model.expert_ffn")
    rules.divides(p.tp, "parallel.tp", m.shared_experts * m.expert_ffn, "model.shared_experts * expert_ffn")
    if p.experts_tp < p.tp and not p.sequence_parallel:  # they share the tokens, which they all hold
        rows = job.batch.micro_batch * m.seq_len // p.cp
        rules.divides(p.tp, "parallel.tp", rows, f"micro_batch * seq_len{' / cp' if p.cp > 1 else ''}")
    rules.require(m.imbalance >= 1, f"model.imbalance must be >= 1 (busiest rank over the mean), got {m.imbalance}")


def _adapters(rules: Rules, job: JobTables) -> None:
    m, stated, rank = job.model, list(job.model.lora_targets), f"model.lora_rank {job.model.lora_rank}"
    rules.require(0 <= m.lora_dropout < 1, f"model.lora_dropout must be in [0, 1), got {m.lora_dropout}")
    if not m.lora_rank or m.family == "dlrm":
        rules.require(not m.lora_rank, f"adapters are for transformers, got {rank} with family 'dlrm'")
        rules.require(not stated, f"model.lora_targets need model.lora_rank > 0 of a transformer, got {stated}")
        return
    rules.require(bool(stated), f"adapters need model.lora_targets, got [] with {rank}")
    heads, keys = m.heads * (m.v_head_dim or m.head_size), m.kv_heads * m.head_size
    ffn = 2 * m.ffn if m.gated_mlp else m.ffn
    sides = {"qkv": heads + 2 * keys, "q": heads, "k": keys, "v": keys, "proj": heads, "fc1": ffn}
    narrow = [t for t in m.lora_targets if m.lora_rank > min(m.hidden, sides.get(t, m.ffn))]
    rules.require(not narrow, f"{rank} must be at most the smaller side of its matrix, got more with {narrow}")
    rules.divides(job.parallel.tp, "parallel.tp", m.lora_rank, "model.lora_rank")
    missing = {"qkv", "q", "k", "v"} if m.attention == "mla" else set[str]()
    missing |= {"fc1", "fc2", "gate", "up"} if m.experts else set() if m.gated_mlp else {"gate", "up"}
    parts = {part for target in stated for part in specs.LORA_TARGETS[target]}
    for wrong, why in (
        ({target for target in stated if stated.count(target) > 1}, "is there twice"),
        (parts & {*stated}, "is part of another one"),
        (missing & {*stated}, "is not in this model (mla, experts or no gate)"),
    ):
        rules += [f"model.lora_targets must name linears of the model once: {name!r} {why}" for name in sorted(wrong)]


def _pipeline(rules: Rules, job: JobTables) -> None:
    m, p = job.model, job.parallel
    micro_batches, parts = job.num_micro_batches, p.pp * p.virtual_stages
    rules.require(p.pp > 1 or p.virtual_stages == 1, f"virtual_stages > 1 needs pp > 1, got {p.virtual_stages}")
    actions, chunks = micro_batches * parts, "" if p.virtual_stages == 1 else " * virtual_stages"
    rules.require(
        actions <= MOST_ACTIONS,
        f"micro-batches * pp{chunks} must be <= {MOST_ACTIONS}, got {micro_batches} * {parts} = {actions}",
    )
    layers = m.total_layers
    if not p.stage_layers:
        parallel_rules.check_stages(rules, layers=layers, pp=p.pp, virtual_stages=p.virtual_stages)
        return
    given, total = len(p.stage_layers), sum(p.stage_layers)
    rules.require(given == parts, f"stage_layers must have pp * virtual_stages = {parts} entries, got {given}")
    rules.require(
        total == layers and min(p.stage_layers) >= 0,
        f"stage_layers must be >= 0 and add up to {layers}, got {min(p.stage_layers)!s:.80} at least and "
        f"{total!s:.80} in sum",
    )


def _cluster(rules: Rules, job: JobTables) -> None:
    c = job.cluster
    places = [
        *(("stragglers", "rank", s.rank, c.num_devices) for s in c.stragglers),
        *(("slow_links", "node", s.node, c.nodes) for s in c.slow_links),
        *(("mixed", "nodes", node, c.nodes) for o in c.mixed for node in o.nodes),
    ]
    for table, key, value, limit in places:
        rules.require(0 <= value < limit, f"cluster.{table}: {key} must lie in 0 ... {limit - 1}, got {value}")
    slow: tuple[specs.Straggler | specs.SlowLink, ...] = (*c.stragglers, *c.slow_links)
    for each in slow:  # neither infinitely so nor by no number
        rules.lies("a slowdown", each.slowdown, 1, MOST_SLOWDOWN)
    named = [node for other in c.mixed for node in other.nodes]
    rules.require(len(named) == len(set(named)), f"cluster.mixed must name every node once, got {sorted(named)!s:.80}")
    for other in c.mixed:
        rules.require(bool(other.hardware), "cluster.mixed: hardware must name a device, got ''")
