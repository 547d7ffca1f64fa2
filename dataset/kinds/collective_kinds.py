"""The collectives of training."""

from __future__ import annotations

from stepsight.dataset.kinds.collective_kind import CollectiveKind

KINDS = (
    CollectiveKind(
        name="all_reduce",
        counts="the reduced buffer",
        passes=2.0,
        trees=True,
        code=0,
        nccl_names={"allreduce": "In", "all_reduce": "In", "allreduce_coalesced": "In"},
        c10d_calls={"c10d::allreduce_": 0},
        gloo_spans=("all_reduce",),
        test_names=("all_reduce",),
    ),
    CollectiveKind(
        name="all_gather",
        counts="the gathered output",
        code=1,
        nccl_names={
            "allgather": "Out",
            "all_gather": "Out",
            "_allgather_base": "Out",
            "_all_gather_base": "Out",
            "allgather_into_tensor_coalesced": "Out",
        },
        c10d_calls={"c10d::_allgather_base_": 0},
        gloo_spans=("all_gather", "_all_gather_base"),
        test_names=("all_gather",),
    ),
    CollectiveKind(
        name="reduce_scatter",
        counts="the whole input",
        code=2,
        nccl_names={"reduce_scatter": "In", "_reduce_scatter_base": "In", "reduce_scatter_tensor_coalesced": "In"},
        c10d_calls={"c10d::_reduce_scatter_base_": 1},
        gloo_spans=("reduce_scatter", "_reduce_scatter_base", "all_reduce"),  # gloo runs it as an all-reduce
        test_names=("reduce_scatter",),
    ),
    CollectiveKind(
        name="all_to_all",
        counts="the input of one rank",
        route="direct",
        buffers=2.0,
        code=3,
        nccl_names={"all_to_all": "In", "all_to_allv": "In"},
        c10d_calls={"c10d::alltoall_base_": 1},
        gloo_spans=("all_to_all",),
        test_names=("alltoall",),
    ),
    CollectiveKind(
        name="broadcast",
        counts="the buffer",
        code=4,
        nccl_names={"broadcast": "In", "_broadcast_oop": "In"},
        c10d_calls={"c10d::broadcast_": 0},
        gloo_spans=("broadcast",),
        test_names=("broadcast",),
    ),
    CollectiveKind(
        name="send_recv",
        counts="the message",
        route="message",
        code=5,
        nccl_names={"send": "In", "recv": "Out"},
        test_names=("sendrecv",),
    ),
)
