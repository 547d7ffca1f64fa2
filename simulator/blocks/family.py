"""Model families: the blocks that each family consists of, as functions from a rank's shape to lists of steps.

``gpt`` and ``llama``: decoder layers with an MLP or experts.
``bert`` (Devlin et al. 2018, arXiv:1810.04805): norms after the residuals; the loss is of every token, as in Hugging
Face's ``BertForMaskedLM``, or of the masked ones alone (``loss_share``), which are copied together before it.  There is
no pooler and no next-sentence loss.
``t5`` (Raffel et al. 2019, arXiv:1910.10683): an encoder, and a decoder that also attends to the encoder's output.  The
first pipeline part looks up the tokens of both; every boundary passes what decoder and encoder need.  Relative
positions are a learned bias of the scores, which every layer reads and whose gradient every layer adds to.
``vit`` (Dosovitskiy et al. 2020, arXiv:2010.11929): an encoder over patches of images and a class token, whose last
activation is classified.  Patches, positions and the classifier are the same on all tensor-parallel ranks.

The vocabulary is shared by tensor-parallel ranks, or every rank has all of it: then each looks its own rows up, and,
with sequence parallelism, fetches all rows before the logits, which every rank computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, cast

from stepsight.dataset.base.caching import cached
from stepsight.dataset.base.errors import JobError, StepsightError
from stepsight.dataset.base.registry import check_takes
from stepsight.dataset.job.specs import FAMILIES, ModelSpec
from stepsight.simulator.blocks.adapters import adapted
from stepsight.simulator.blocks.attention import Heads, attention, core, latent_attention
from stepsight.simulator.blocks.dlrm import dlrm_embedding, dlrm_head, dlrm_kinds, dlrm_layer
from stepsight.simulator.blocks.layer_parts import (
    activation,
    column_linear,
    enter,
    fork,
    leave,
    linear,
    main_casts,
    metric_losses,
    mlp,
    norm,
    residual,
    row_linear,
    token_metrics,
)
from stepsight.simulator.blocks.moe import experts
from stepsight.simulator.blocks.step import Block, Flow, Item, RankShape, Saved, Step, in_module, offloaded, recomputed

LayerKinds = tuple[tuple[str, int], ...]
_TOKEN_TYPES, _BUCKETS = 2, 32  # of BERT; of T5's relative positions


def tokens(shape: RankShape, shared: bool = False, *, again: bool = False) -> Block:
    """Embedding of the tokens.

    ``shared``: its table is also the logits' on this rank, so two gradients are added.  ``again``: the same table once
    more, counted where it is first used.
    """
    hidden, vocab = shape.model.hidden, shape.model.vocab // shape.vocab_tp
    parallel = shape.vocab_tp > 1
    rows = shape.rows if parallel else shape.local_rows
    join = (shape.op("add", vocab * hidden),) if shared or again else ()
    table = Step(
        "embedding",
        (shape.op("embedding", rows, hidden, vocab),),
        weight_grad=(shape.op("embedding_backward", rows, hidden, vocab), *join),
        parameters=() if again else (vocab * hidden,),
        replicated=shape.tp.size > 1 and not parallel,
        flow=(Flow.ASIDE,) * again,
    )
    return (table, *(leave(shape) if parallel else ()))


def positions(shape: RankShape) -> Step:
    numel = shape.local_rows * shape.model.hidden
    return Step(
        "positions",
        (shape.op("add", numel),),
        weight_grad=(shape.op("reduce", numel),),
        parameters=(shape.model.seq_len * shape.model.hidden,),
        replicated=True,
    )


def logits_and_loss(shape: RankShape, shared: bool = False, *, bias: bool = False) -> Block:
    """Logits and cross-entropy (in the main type).

    ``shared``: the table is the embedding's on this rank and is counted there.
    """
    model, vocab, rows = shape.model, shape.model.vocab // shape.vocab_tp, shape.rows
    logits = Step(
        "logits",
        (shape.op("linear", rows, vocab, model.hidden),),
        (shape.op("linear_dgrad", rows, vocab, model.hidden),),
        (shape.op("linear_wgrad", rows, vocab, model.hidden), *([shape.op("bias_grad", rows, vocab)] if bias else [])),
        (*([vocab] if bias else []), *([] if shared else [vocab * model.hidden])),
        weight_grad_first=not bias,
        saved=(Saved(shape.rows_before_columns * model.hidden * shape.dtype_bytes),),
    )
    statistics: tuple[Item, ...] = ()
    if shape.vocab_tp > 1:  # maximum of the logits; sum of exponentials and the target's logit
        reduce, scale = shape.tp_comm("all_reduce", rows * shape.main_bytes), shape.main_op("elementwise", rows)
        statistics = (shape.main_op("copy", rows), reduce, scale, reduce, reduce, scale)
    before: Block = ()
    if shape.vocab_parallel:
        before = enter(shape)
    elif shape.tp.size > 1 and shape.sequence_parallel:  # each rank computes the whole gradient and keeps its rows
        before = (Step("tp", (shape.tp_comm("all_gather", rows * model.hidden * shape.dtype_bytes),)),)
    return (*before, logits, loss(shape, rows, vocab, statistics))


def loss(shape: RankShape, rows: int, classes: int, statistics: tuple[Item, ...] = ()) -> Step:
    """Cross-entropy in the main type; logits and their gradient are in the activations' type, as is everything with
    ``fused_loss``.
    """
    kernels, size, again = shape.kernels, shape.main_bytes, metric_losses(shape, rows, classes)
    if shape.model.fused_loss:
        ends = shape.op("cross_entropy", rows, classes), shape.op("cross_entropy_backward", rows, classes)
        saved = (Saved(rows * classes * shape.dtype_bytes),)
        # Metrics are computed after the backward, when nothing but the logits is left.
        return Step("loss", (ends[0], *statistics, *again), (ends[1],), saved=saved, in_place=True)
    apart = kernels.separate_kernels or kernels.token_metrics or kernels.casts_parameters
    casts = main_casts(shape, rows * classes) if apart else ()
    metrics = token_metrics(shape, rows, classes) if kernels.token_metrics else ()
    return Step(
        "loss",
        (*casts, shape.main_op("cross_entropy", rows, classes), *statistics, *metrics, *again),
        (shape.main_op("cross_entropy_backward", rows, classes), *casts),
        saved=(Saved(rows * classes * size),),
        temporary_bytes=rows * classes * (shape.dtype_bytes - size),
    )


def decoder_kinds(model: ModelSpec) -> LayerKinds:
    """Kind of each layer: all equal, or ``dense`` ones first and then an expert layer every ``moe_every`` layers."""
    if not model.experts:
        return (("layer", model.layers),)
    kinds = ["dense"] * model.dense_layers
    others = range(1, model.layers - model.dense_layers + 1)
    kinds += ["dense" if place % model.moe_every else "moe" for place in others]
    return tuple((kind, len(list(run))) for kind, run in groupby(kinds))


def decoder_layer(shape: RankShape, kind: str = "layer") -> Block:
    """One decoder layer: ``layer`` and ``dense`` with an MLP, ``moe`` with experts."""
    latent = shape.model.attention == "mla"
    look = latent_attention(shape) if latent else attention(shape, rotary=shape.model.family == "llama")
    again = "moe" in shape.recompute_modules
    think = in_module(experts(shape), "moe", whole=again) if kind == "moe" else in_module(mlp(shape), "mlp")
    before: Block = (norm(shape, "norm1"),)
    if latent:  # otherwise Transformer Engine's linear has the norm in it
        before = in_module(before, "layernorm")
    return (*before, *look, residual(shape), *in_module((norm(shape, "norm2"),), "layernorm"), *think, residual(shape))


def decoder_embedding(shape: RankShape, shared: bool = False) -> Block:
    """Tokens, with learned positions for ``gpt``; ``shared``: as in ``tokens``."""
    learned = (positions(shape),) if shape.model.family == "gpt" else ()
    return (*tokens(shape, shared), *learned)


def decoder_head(shape: RankShape, shared: bool = False) -> Block:
    """Final norm, logits and cross-entropy; ``shared``: as in ``logits_and_loss``."""
    return (norm(shape, "final_norm", fork=False), *logits_and_loss(shape, shared))


def bert_layer(shape: RankShape, kind: str = "layer") -> Block:
    look = (fork(shape), *attention(shape, causal=False), residual(shape), norm(shape, "norm1", fork=False))
    return (*look, fork(shape), *mlp(shape), residual(shape), norm(shape, "norm2", fork=False))


def bert_embedding(shape: RankShape, shared: bool = False) -> Block:
    """Tokens, positions and token types, and their norm."""
    hidden, dims = shape.model.hidden, (shape.local_rows, shape.model.hidden, _TOKEN_TYPES)
    types = Step(
        "token_types",
        (shape.op("embedding", *dims), shape.op("add", shape.local_rows * hidden)),
        weight_grad=(shape.op("embedding_backward", *dims),),
        parameters=(_TOKEN_TYPES * hidden,),
        replicated=True,
    )
    words = tokens(shape, shared)
    return (*words, positions(shape), types, norm(shape, "embedding_norm", fork=False))


def bert_head(shape: RankShape, shared: bool = False) -> Block:
    """A transform, its norm, and logits with a bias."""
    masked: Block = ()
    if shape.model.loss_share < 1.0:
        length = max(1, round(shape.seq_len * shape.cp.size * shape.model.loss_share))
        shape = replace(shape, model=replace(shape.model, unpadded_len=length))
        copied = (shape.op("copy", shape.local_rows * shape.model.hidden),)
        masked = (Step("masked_tokens", copied, copied),)
    hidden, rows = shape.model.hidden, shape.local_rows
    plain = replace(shape, model=replace(shape.model, gated_mlp=False))
    transform = linear(shape, "transform", hidden, hidden, rows, replicated=True)
    found = (transform, activation(plain, rows, hidden), norm(shape, "head_norm", fork=False))
    return (*masked, *found, *logits_and_loss(shape, shared, bias=True))


def encoder_shape(shape: RankShape) -> RankShape:
    return replace(shape, model=replace(shape.model, seq_len=shape.model.encoder_seq_len))


def t5_kinds(model: ModelSpec) -> LayerKinds:
    """The last layers do not add their gradients to another one; the encoder's last layer includes its final norm."""
    encoder = (("encoder", model.encoder_layers - 1), ("last_encoder", 1))
    kinds = (*encoder, ("decoder", model.layers - 1), ("last_decoder", 1))
    return tuple((kind, count) for kind, count in kinds if count)


def t5_boundary_bytes(shape: RankShape, layers_before: int) -> int:
    rows = shape.local_rows + encoder_shape(shape).local_rows
    return rows * shape.model.hidden * shape.dtype_bytes


def t5_layer(shape: RankShape, kind: str) -> Block:
    adds = kind in ("encoder", "decoder")
    if kind in ("decoder", "last_decoder"):
        look = (norm(shape, "norm1"), *_biased(shape, adds, causal=True), residual(shape), *_cross(shape, adds))
        return (*look, norm(shape, "norm3"), *mlp(shape), residual(shape))
    shape = encoder_shape(shape)
    look = (norm(shape, "norm1"), *_biased(shape, adds, causal=False), residual(shape))
    end: Block = ()
    if kind == "last_encoder":
        found = Saved(shape.rows_before_columns * shape.model.hidden * shape.gemm_bytes)
        last = norm(shape, "encoder_norm", fork=False)
        end = (replace(last, saved=(*last.saved, found)),)
    return (*look, norm(shape, "norm2"), *mlp(shape), residual(shape), *end)


def _biased(shape: RankShape, adds: bool, *, causal: bool) -> Block:
    """Self-attention with relative positions: unfused kernels add the bias to the scores.

    ``adds``: the bias's gradient is added to that of later layers.
    """
    numel = _scores(shape)
    total: tuple[Item, ...] = (shape.op("add", numel),) if adds else ()
    block = list(attention(shape, causal=causal))
    for index, step in enumerate(block):
        if step.name == "attention":
            block[index] = replace(step, backward=(*step.backward, *total))
        elif step.name == "scores":
            add, reduce = (shape.op(word, shape.micro_batch * numel) for word in ("add", "reduce"))
            block[index] = replace(step, forward=(*step.forward, add), backward=(reduce, *step.backward, *total))
    return tuple(block)


def _scores(shape: RankShape) -> int:
    """Scores of one sequence on one rank."""
    return shape.model.heads // shape.tp.size * shape.seq_len * shape.model.seq_len


def _cross(shape: RankShape, adds: bool) -> Block:
    """Attention of the decoder's tokens to the encoder's output.

    All of the decoder's layers keep the same encoder's output, which is counted with the encoder's last layer.
    """
    model, far = shape.model, encoder_shape(shape)
    heads, kv_heads, size = model.heads // shape.tp.size, model.kv_heads // shape.tp.size, model.head_size
    sizes = Heads(heads, kv_heads, size, size, shape.seq_len, far.seq_len, causal=False)
    sums: Block = (Step("encoder", flow=(Flow.KEEP, Flow.DROP)),)  # gradients of the encoder's output are summed
    if adds:
        sums = (
            *sums,
            Step("fork", backward=(shape.op("add", far.local_rows * model.hidden),)),
        )
    return (
        norm(shape, "norm2"),
        *enter(shape),
        column_linear(shape, "cross_q", heads * size, model.hidden),
        *sums,
        *enter(far),
        replace(column_linear(far, "cross_kv", 2 * kv_heads * size, model.hidden), saved=()),
        *(replace(step, flow=(Flow.JOIN,) * (not at)) for at, step in enumerate(core(shape, sizes))),
        row_linear(shape, "cross_out", model.hidden, heads * size),
        *leave(shape),
        residual(shape),
    )


def t5_embedding(shape: RankShape, shared: bool = False) -> Block:
    """Tokens of encoder and decoder with the same table, and the tables of relative positions."""
    heads, tables = shape.model.heads // shape.tp.size, []
    for own, name in ((encoder_shape(shape), "encoder_positions"), (shape, "decoder_positions")):
        dims = (_scores(own) // heads, heads, _BUCKETS)
        read, add = shape.op("embedding", *dims), shape.op("embedding_backward", *dims)
        tables.append(Step(name, (read,), weight_grad=(add,), parameters=(_BUCKETS * heads,), flow=(Flow.ASIDE,)))
    return (*tokens(encoder_shape(shape), shared), *tokens(shape, again=True), *tables)


def vit_layer(shape: RankShape, kind: str = "layer") -> Block:
    look = (norm(shape, "norm1"), *attention(shape, causal=False), residual(shape))
    return (*look, norm(shape, "norm2"), *mlp(shape), residual(shape))


def vit_embedding(shape: RankShape, shared: bool = False) -> Block:
    """A linear on every patch, the class token, and positions."""
    model, whole = shape.model, shape.local_rows == shape.rows and shape.cp.size == 1
    rows = shape.local_rows - (shape.micro_batch if whole else 0)  # ranks with a part of an image: at most one fewer
    patches = replace(
        linear(shape, "patches", model.hidden, model.patch_dim, rows, replicated=True),
        backward=(),
        weight_grad_first=False,
    )  # images need no gradient
    token = Step(
        "class_token",
        (shape.op("copy", shape.local_rows * model.hidden),),
        weight_grad=(shape.op("reduce", shape.micro_batch * model.hidden),),
        parameters=(model.hidden,),
        replicated=True,
    )
    return (patches, token, positions(shape))


def vit_head(shape: RankShape, shared: bool = False) -> Block:
    """Final norm of all rows, logits of one row per image, loss."""
    model, images = shape.model, shape.micro_batch
    pick = Step(
        "pick",
        (shape.op("copy", images * model.hidden),),
        (shape.op("fill", shape.local_rows * model.hidden), shape.op("copy", images * model.hidden)),
    )
    classes = linear(shape, "classes", model.vocab, model.hidden, images, replicated=True)
    return (norm(shape, "final_norm", fork=False), pick, classes, loss(shape, images, model.vocab))


def _equal_layers(model: ModelSpec) -> LayerKinds:
    return (("layer", model.layers),)


def _one_activation(shape: RankShape, layers_before: int) -> int:
    return shape.local_rows * shape.model.hidden * shape.dtype_bytes


@dataclass(frozen=True)
class Family:
    """A model family: functions that make the blocks of its parts.

    Attributes:
        embedding: ``(shape, shared) -> Block``: what comes first; ``shared`` if its table is the head's on this rank.
        layer: ``(shape, kind) -> Block``: one layer.
        head: ``(shape, shared) -> Block``: what comes last, the loss included.
        layer_kinds: Kinds of the layers in model order, run-length encoded.
        boundary_bytes: ``(shape, layers_before)``: bytes that pass from one pipeline part to the next.

    Raises:
        JobError: On construction, if one is no function of these arguments.
    """

    embedding: Callable[[RankShape, bool], Block]
    layer: Callable[[RankShape, str], Block]
    head: Callable[[RankShape, bool], Block]
    layer_kinds: Callable[[ModelSpec], LayerKinds] = _equal_layers
    boundary_bytes: Callable[[RankShape, int], int] = _one_activation

    def __post_init__(self) -> None:
        for name, arguments in (
            ("embedding", ("shape", "shared")),
            ("layer", ("shape", "kind")),
            ("head", ("shape", "shared")),
            ("layer_kinds", ("model",)),
            ("boundary_bytes", ("shape", "layers_before")),
        ):
            check_takes(f"{name} of a model family", getattr(self, name), arguments, JobError)


_DECODER = Family(decoder_embedding, decoder_layer, decoder_head, decoder_kinds)
_BUILT_IN = {
    "gpt": _DECODER,
    "llama": _DECODER,
    "bert": Family(bert_embedding, bert_layer, bert_head),
    "t5": Family(t5_embedding, t5_layer, decoder_head, t5_kinds, t5_boundary_bytes),
    "vit": Family(vit_embedding, vit_layer, vit_head),
    "dlrm": Family(dlrm_embedding, dlrm_layer, dlrm_head, dlrm_kinds),
}
FAMILIES.fill(_BUILT_IN)  # the names alone are declared with the specs, which know no blocks


def register_family(name: str, family: Family) -> None:
    """Register a family of your own, so that jobs can say ``[model] family = name``.

    Raises:
        JobError: If the name is taken, or ``family`` is no ``Family``.
    """
    FAMILIES.register(name, _checked(name, family))


def find_family(name: str) -> Family:
    """Return the blocks of a family.

    Raises:
        JobError: If the name is not known, or what a package brings under it is no ``Family``.
    """
    return _checked(name, FAMILIES[name])


def _checked(name: str, family: Any) -> Family:
    if not isinstance(family, Family):
        raise JobError(f"model family {name!r:.80} must be a simulator.blocks.Family, got {family!r:.80}")
    return family


def _block(name: str, part: str, *arguments: Any) -> Block:
    """Make the steps of a part of a family's model; a mistake in a user's family becomes a ``JobError``."""
    function = getattr(find_family(name), part)
    if name in _BUILT_IN:
        return cast(Block, function(*arguments))
    try:
        block = function(*arguments)
    except StepsightError:
        raise
    except Exception as error:  # a user's function can raise any exception
        raise JobError(f"model family {name!r:.80}: {part} raises {type(error).__name__}: {error}") from error
    if not isinstance(block, tuple) or not all(isinstance(step, Step) for step in block):
        raise JobError(f"model family {name!r:.80}: {part} must return a tuple of steps, got {block!r:.80}")
    return block


LOWEST = "lowest "  # begins the kind of the first layer where nothing before it is trained


def layer_kinds(model: ModelSpec) -> LayerKinds:
    """Kinds of a model's layers in its order, run-length encoded."""
    kinds = find_family(model.family).layer_kinds(model)
    if not model.lora_rank:
        return kinds
    (kind, count), *others = kinds
    return ((LOWEST + kind, 1), *([(kind, count - 1)] if count > 1 else []), *others)


@cached(4096)
def embedding_block(shape: RankShape, shared: bool = False) -> Block:
    """Blocks before the first layer."""
    return adapted(shape, _block(shape.model.family, "embedding", shape, shared), lowest=True)


@cached(4096)
def layer_block(shape: RankShape, kind: str) -> Block:
    """One layer; some modules are recomputed, or its kept activations are offloaded, if the job says so."""
    own = _block(shape.model.family, "layer", shape, kind.removeprefix(LOWEST))
    block = recomputed(adapted(shape, own, lowest=kind.startswith(LOWEST)), shape.recompute_modules)
    return offloaded(block, shape.dtype, shape.offload_share) if shape.offload_share else block


@cached(4096)
def head_block(shape: RankShape, shared: bool = False) -> Block:
    """Blocks after the last layer."""
    return adapted(shape, _block(shape.model.family, "head", shape, shared))
