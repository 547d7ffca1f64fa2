"""Virtual stages and layers per stage of Megatron-LM's settings."""

from __future__ import annotations

import re

from stepsight.dataset.configs.drafts import Draft, Settings

_REPEATED = re.compile(r"\(([^()]*)\)\*(\d+)|([A-Za-z|])\*(\d+)")
_MOST_STAGES = 10_000


def read_stages(settings: Settings, draft: Draft) -> None:
    """Set virtual stages, and the layers of each stage if they are uneven."""
    layers, pp = draft.get("model.layers"), draft.degree("pp")
    layout = settings.word("pipeline_model_parallel_layout")
    if layout and layers:
        _layout(draft, layout, settings.source("pipeline_model_parallel_layout"))
        return
    chunks = settings.positive("num_virtual_stages_per_pipeline_rank", "virtual_pipeline_model_parallel_size")
    source = settings.source("num_virtual_stages_per_pipeline_rank", "virtual_pipeline_model_parallel_size")
    each = settings.positive("num_layers_per_virtual_pipeline_stage")
    if chunks is None and each and layers:
        source = settings.source("num_layers_per_virtual_pipeline_stage")
        chunks = max(1, layers // pp // each)
    if chunks and chunks > 1:
        draft.map("parallel.virtual_stages", chunks, source)
    _uneven(settings, draft, pp * (chunks or 1))


def _uneven(settings: Settings, draft: Draft, parts: int) -> None:
    layers, pp = draft.get("model.layers"), draft.degree("pp")
    first = settings.positive("decoder_first_pipeline_num_layers")
    last = settings.positive("decoder_last_pipeline_num_layers")
    parted = "embedding" in settings.word("pp_partition_method")  # DeepSpeed counts both tables as layers
    embedding = settings.flag("account_for_embedding_in_pipeline_split") or parted
    loss = settings.flag("account_for_loss_in_pipeline_split") or parted
    if not layers or pp == 1 or parts > _MOST_STAGES or not (first or last or embedding or loss):
        return
    if embedding or loss:
        even, rest = divmod(layers + embedding + loss, parts)
        counts = [even] * parts
        counts[0] -= embedding
        counts[-1] -= loss
        names = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "pp_partition_method")
        source = settings.source(*names)
    else:
        # Counts are those of a rank, so that each of its virtual stages has an equal part.
        source = settings.source("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
        chunks = parts // pp
        others = pp - bool(first) - bool(last)
        even, rest = divmod(layers - (first or 0) - (last or 0), max(1, others))
        ranks = [even] * pp
        ranks[0], ranks[-1] = first or ranks[0], last or ranks[-1]
        rest += sum(count % chunks for count in ranks)
        counts = [count // chunks for _ in range(chunks) for count in ranks]
    if rest or sum(counts) != layers or min(counts) < 0:
        draft.ignore(f"{source}: {layers} layers cannot be shared so by {parts} stages")
    else:
        draft.map("parallel.stage_layers", counts, source)


def stages_of_layout(layout: str) -> list[str]:
    """The stages of a layout as ``Et|(tt|)*29|mL``, each with a letter for each of its layers; empty: too long."""
    text = re.sub(r"[\s,]", "", layout)
    while (found := _REPEATED.search(text)) is not None:
        what, count = found[1] if found[1] is not None else found[3], int(found[2] or found[4])
        if count * len(what) > _MOST_STAGES or len(text) > _MOST_STAGES:
            return []
        text = text[: found.start()] + what * count + text[found.end() :]
    return text.split("|")


def _layout(draft: Draft, layout: str, source: str) -> None:
    pp, layers = draft.degree("pp"), draft.get("model.layers")
    stages = stages_of_layout(layout)
    counts = [stage.count("t") for stage in stages]
    if not stages or len(stages) % pp or sum(counts) != layers:
        draft.ignore(f"{source} {layout}: {len(stages)} stages of {sum(counts)} layers for pp {pp} and {layers} layers")
        return
    if len(stages) // pp > 1:
        draft.map("parallel.virtual_stages", len(stages) // pp, source)
    draft.map("parallel.stage_layers", counts, f"{source} {layout}")
