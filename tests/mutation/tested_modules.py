"""The modules that are mutated, and the tests that must notice."""

KERNEL = "tests/simulator/clock/test_kernel.py"
TRACK, RUNS = "tests/simulator/clock/test_track.py", "tests/simulator/clock/test_track_run.py"
SIMULATE, RUNTIMES = "tests/simulator/iteration/test_simulate.py", "tests/simulator/schedules/test_pipeline_runtimes.py"
SEGMENTS = ("tests/simulator/durations/test_segment_timing.py", "tests/simulator/programs/test_segment.py")
RECORDED = "tests/simulator/programs/test_recorded_programs.py"
SCHEDULES = (
    "tests/simulator/schedules/test_order.py", "tests/simulator/schedules/test_torch.py",
    "tests/dataset/job/test_schedule_kinds.py",
)  # fmt: skip
# The tests of each module, those that fail soonest first.
TESTS: dict[str, tuple[str, ...]] = {
    "simulator/clock/engine.py": ("tests/simulator/clock/test_engine.py", *SEGMENTS, SIMULATE),
    "simulator/schedules/order.py": (
        "tests/simulator/schedules/test_order.py", "tests/simulator/schedules/test_entries.py", TRACK, RUNTIMES, RUNS),
    "simulator/clock/track.py": (
        TRACK, KERNEL, RUNS, "tests/dataset/job/test_schedule_kinds.py", SIMULATE,
        "tests/training/measured/test_planning.py",
    ),
    "dataset/base/caching.py": ("tests/dataset/base/test_caching.py",),
    "simulator/iteration/simulate.py": (SIMULATE, "tests/simulator/iteration"),
    "simulator/durations/segment_timing.py": (*SEGMENTS, SIMULATE),
    "dataset/job/schedules.py": SCHEDULES,
    **{f"simulator/memory/{name}.py": ("tests/simulator/memory/test_reference_values.py", "tests/simulator/memory")
       for name in ("estimate", "part", "peaks")},
    **{f"simulator/blocks/{name}.py": (RECORDED, "tests/simulator/memory/test_reference_values.py",
                                       "tests/simulator/blocks")
       for name in ("attention", "family", "layer_parts", "moe", "step")},
    **{f"simulator/programs/{name}.py": (RECORDED, "tests/simulator/programs", SIMULATE)
       for name in ("block_pass", "lower", "buckets", "op_level", "segment", "sizes", "stage")},
    **{f"dataset/kinds/{name}.py": ("tests/dataset/kinds/test_closed_forms.py", "tests/dataset/kinds")
       for name in ("kind_table", "op", "op_kinds")},
    "gnn/context_model.py": ("tests/gnn/test_context_model.py",),
}  # fmt: skip
