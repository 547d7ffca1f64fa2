"""Add kinds of ops: a short causal convolution over the tokens, as linear-attention models run it before attention.

A record says what the dims mean and what an op costs; a block issues the ops.  Nothing measured them, so a predictor
takes the efficiency of ``base``: by default that of an addition which moves as many bytes.  Run this file with
``python examples/own_op_kind.py``.  ``stepsight.testing.OpKindContract`` checks a kind; ``tests/examples`` applies it
to these.
"""

from dataclasses import replace

from stepsight import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec, predict
from stepsight.registries import FAMILIES, OP_KINDS, OpKind, blocks

DIMS = ("rows", "channels", "width")  # tokens, channels, taps of the filter

SHORT_CONV = OpKind(
    name="short_conv",
    family="short_conv",
    dim_names=DIMS,
    flops=lambda rows, channels, width: 2.0 * rows * channels * width,
    elements=lambda rows, channels, width: 2.0 * rows * channels + channels * width,
    bound="memory",
    streams=True,
    in_harness=False,  # ``stepsight collect`` cannot measure it
)
SHORT_CONV_BACKWARD = OpKind(
    name="short_conv_backward",
    family="short_conv",
    dim_names=DIMS,
    flops=lambda rows, channels, width: 4.0 * rows * channels * width,
    elements=lambda rows, channels, width: 3.0 * rows * channels + 2.0 * channels * width,
    bound="memory",
    streams=True,
    in_harness=False,
    base="short_conv",
)


def convolution(shape: blocks.RankShape) -> blocks.Step:
    """Forward and backward of the convolution on one rank."""
    dims = (shape.local_rows, shape.model.hidden, 4)
    return blocks.Step(
        "short_conv",
        forward=(shape.op("short_conv", *dims),),
        backward=(shape.op("short_conv_backward", *dims),),
        parameters=(shape.model.hidden * 4,),
        replicated=True,
        saved=(blocks.Saved(shape.local_rows * shape.model.hidden * shape.dtype_bytes),),
    )


def layer(shape: blocks.RankShape, kind: str) -> blocks.Block:
    return (convolution(shape), *FAMILY_OF_GPT.layer(shape, kind))


FAMILY_OF_GPT = blocks.find_family("gpt")


def main() -> None:
    for kind in (SHORT_CONV, SHORT_CONV_BACKWARD):
        OP_KINDS.register(kind.name, kind)
    FAMILIES.register("gpt-with-convolution", replace(FAMILY_OF_GPT, layer=layer))
    usual = Job(
        model=ModelSpec(family="gpt", layers=32, hidden=4096, heads=32, vocab=51200, seq_len=2048),
        parallel=ParallelSpec(tp=8),
        batch=BatchSpec(micro_batch=4, global_batch=32, precision="bf16"),
        cluster=ClusterSpec(hardware="a100-sxm-80gb", nodes=1, devices_per_node=8),
    )
    ours = replace(usual, model=replace(usual.model, family="gpt-with-convolution"))
    for job in (ours, usual):
        print(f"{job.name}: {predict(job).iteration_time_s * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
