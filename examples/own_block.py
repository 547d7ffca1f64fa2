"""A layer of one's own: attention and MLP side by side, as in GPT-J and PaLM (Chowdhery et al. 2022, arXiv:2204.02311).

Both read the same norm, so their first linears are one product and their last ones another, and tensor-parallel ranks
speak once instead of twice.  Run it with ``python examples/own_block.py``.
"""

from dataclasses import replace

from stepsight import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec, predict
from stepsight.registries import FAMILIES, Family, blocks


def layer(shape: blocks.RankShape, kind: str) -> blocks.Block:
    """Forward and backward of one layer on one rank, op by op."""
    heads = blocks.self_heads(shape, causal=True)
    hidden, ffn = shape.model.hidden, shape.model.ffn // shape.tp.size
    return (
        blocks.norm(shape, "norm"),
        *blocks.enter(shape),  # tensor parallel: says nothing forward, all-reduces backward
        blocks.column_linear(shape, "qkv_fc1", heads.joined + ffn, hidden),
        *blocks.core(shape, heads),
        blocks.activation(shape, shape.rows, ffn),
        blocks.row_linear(shape, "out_fc2", hidden, heads.heads * heads.v_dim + ffn),
        *blocks.leave(shape),  # all-reduces forward
        blocks.residual(shape),
    )


def embedding(shape: blocks.RankShape, shared: bool) -> blocks.Block:
    return (*blocks.tokens(shape, shared), blocks.positions(shape))


def head(shape: blocks.RankShape, shared: bool) -> blocks.Block:
    return (blocks.norm(shape, "final_norm", fork=False), *blocks.logits_and_loss(shape, shared))


def main() -> None:
    FAMILIES.register("side-by-side", Family(embedding, layer, head))
    ours = Job(
        model=ModelSpec(family="side-by-side", layers=32, hidden=4096, heads=32, vocab=51200, seq_len=2048),
        parallel=ParallelSpec(tp=8),
        batch=BatchSpec(micro_batch=4, global_batch=32, precision="bf16"),
        cluster=ClusterSpec(hardware="a100-sxm-80gb", nodes=1, devices_per_node=8),
    )
    usual = replace(ours, model=replace(ours.model, family="gpt"))
    for job in (ours, usual):
        print(f"{job.name}: {predict(job).iteration_time_s * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
