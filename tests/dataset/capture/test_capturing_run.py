"""Scripts captured as they are: what is written down agrees with hand calculation; what cannot be captured is said."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from stepsight.dataset.base.errors import CaptureError
from stepsight.dataset.capture.captured import Captured, read_captured, write_captured
from stepsight.dataset.capture.capturing_run import (
    CaptureRequest,
    Issued,
    _line_of_stack,
    capture,
    check_orders,
    issued_by_group,
)

pytest.importorskip("torch")

WORLD, ROWS, WIDTH, LAYERS = 1024, 32, 512, 6

DDP = f"""
    import os, torch, torch.distributed as dist
    from torch import nn
    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    layers = [nn.Linear({WIDTH}, {WIDTH}) for _ in range({LAYERS})]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers).to(device), [device.index], bucket_cap_mb=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(5):
        loss = model(torch.randn({ROWS}, {WIDTH}, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item())
"""
PIPELINE = """
    import torch, torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    layer = nn.Linear(64, 64).cuda()
    stage = PipelineStage(layer, rank, dist.get_world_size(), torch.device("cuda"))
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for step in range(3):
        x = torch.randn(32, 64, device="cuda")
        schedule.step(*([x] if rank == 0 else []), **({"target": x} if rank == dist.get_world_size() - 1 else {}))
        optimizer.step()
        optimizer.zero_grad()
"""

ONE_STEP = "import torch\noptimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(4))], 0.1)"


def written(folder: Path, text: str) -> Path:
    script = folder / "train.py"
    script.write_text(textwrap.dedent(text), "utf-8")
    return script


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Captured:
    script = written(tmp_path_factory.mktemp("ddp"), DDP)
    return capture(CaptureRequest(script, (), WORLD))


def test_ddp_reduces_every_gradient_once_in_buckets(ddp: Captured) -> None:
    """The buckets are the Reducer's own, and their bytes are those of the parameters."""
    (rank,) = ddp.to_dict()["ranks"]
    assert {row["kind"] for row in rank["collectives"]} == {"all_reduce"}
    assert {row["group_size"] for row in rank["collectives"]} == {WORLD}
    assert sum(row["count"] for row in rank["collectives"]) > 1
    total = sum(row["count"] * row["num_bytes"] for row in rank["collectives"])
    assert total == 4 * LAYERS * (WIDTH * WIDTH + WIDTH)


def test_flop_are_those_of_the_products(ddp: Captured) -> None:
    """The first layer has no gradient of its input."""
    (rank,) = ddp.to_dict()["ranks"]
    assert rank["flops"] == 2 * ROWS * WIDTH * WIDTH * (3 * LAYERS - 1)
    kinds = rank["ops_by_kind"]
    assert (kinds["linear"], kinds["linear_wgrad"], kinds["linear_dgrad"]) == (LAYERS, LAYERS, LAYERS - 1)


def test_reductions_run_beside_the_computation_and_are_waited_for(ddp: Captured) -> None:
    (graph,) = ddp.graphs
    collectives = {node for node in range(len(graph)) if graph.kind_of(node) == "all_reduce"}
    assert {graph.streams[graph.columns["stream"][node]] for node in collectives} == {"world"}
    waits = {
        source
        for source, target in zip(
            graph.edge_columns["source"].tolist(), graph.edge_columns["target"].tolist(), strict=True
        )
        if source in collectives and target not in collectives
    }
    assert waits == collectives


def test_a_value_that_is_read_is_noted_with_its_line(ddp: Captured) -> None:
    assert any(text.startswith("train.py:15 reads a value") for text in ddp.graphs[0].warnings)


def test_a_capture_is_read_back_as_it_was_written(ddp: Captured, tmp_path: Path) -> None:
    write_captured(ddp, tmp_path / "captured")
    again = read_captured(tmp_path / "captured")
    assert again.to_dict() == ddp.to_dict()
    (tmp_path / "captured" / "rank0.json").write_text("{}", "utf-8")
    with pytest.raises(CaptureError, match="must be what `stepsight capture` or"):
        read_captured(tmp_path / "captured")


def test_every_stage_of_a_pipeline_is_captured_and_meets_its_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "queue.py").write_text("raise RuntimeError", "utf-8")
    monkeypatch.chdir(elsewhere)  # a file there must not hide a module of Python
    captured = capture(CaptureRequest(written(tmp_path, PIPELINE), (), 2))
    assert [graph.rank for graph in captured.graphs] == [0, 1]
    for graph in captured.graphs:
        assert {ranks for _, ranks in graph.groups} == {(0, 1), (1, 0)}
        sent = [graph.works[work] for work in graph.columns["work"].tolist() if graph.works[work].kind == "send_recv"]
        assert [work.num_bytes for work in sent] == [8 * 64 * 4] * 8


COMPILED = """
    import torch
    from torch import nn
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).cuda()
    if {blocks}:
        for place in range(3):
            model[place] = torch.compile(model[place], fullgraph=False)
    else:
        model = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        model(torch.randn(32, 64, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_compiled_regions_of_a_gpu_are_fused_kernels(tmp_path: Path) -> None:
    """What Inductor fuses is one op by its bytes; products keep their own, also in the backward."""
    captured = capture(CaptureRequest(written(tmp_path, COMPILED.format(blocks=True)), (), 8))
    (rank,) = captured.to_dict()["ranks"]
    kinds = rank["ops_by_kind"]
    assert sum(count for kind, count in kinds.items() if kind.startswith("linear")) == 5
    assert kinds["fused"] >= 2
    assert "gelu" not in kinds
    assert not rank["warnings"]
    assert max(w.dims[0] for w in captured.ranks[0].graph.works if getattr(w, "kind", "") == "fused") >= 32 * 64


def test_on_a_cpu_compiled_regions_are_nodes(tmp_path: Path) -> None:
    """Inductor says what is fused for a call's sizes: loops are ops with their amounts, products keep their own."""
    text = COMPILED.format(blocks=False).replace(".cuda()", "").replace(', device="cuda"', "")
    script = written(tmp_path, text.replace("torch.compile(model)", "torch.compile(model, dynamic=True)"))
    captured = capture(CaptureRequest(script, (), 1, 1, device="cpu"))
    (rank,) = captured.to_dict()["ranks"]
    assert rank["ops_by_kind"]["linear"] == 5  # two in the forward, and their gradients but that of the input
    assert "gelu" not in rank["ops_by_kind"]
    assert not rank["warnings"]
    loops = [work for work in captured.ranks[0].graph.works if getattr(work, "kind", "") == "fused_loops"]
    assert loops
    assert all(work.num_bytes > 0 for work in loops)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import torch\ntorch.zeros(4).view(3, 7)", "train.py:2: RuntimeError"),
        (f"{ONE_STEP}\noptimizer.step()", "must take at least 2 training steps"),
        ("print('no data', flush=True)\nexit(3)", r"train.py:2: the script ended itself \(SystemExit: 3\) .*: no data"),
        ("import torch.multiprocessing as mp\nmp.spawn(print, nprocs=2)", "train.py:2: .* starts processes of its own"),
        ("import os\nif os.fork() == 0:\n    os._exit(0)", "train.py:2: .* starts processes of its own"),
    ],
)
def test_what_cannot_be_captured_is_said_with_the_line(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=said):
        capture(CaptureRequest(written(tmp_path, text), (), 8))


def test_sharded_modules_of_torchrec_that_are_unknown_are_refused_with_what_to_do(tmp_path: Path) -> None:
    package = tmp_path / "torchrec" / "distributed"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text("def shard():\n    raise ValueError('wrong device')\n")
    script = written(tmp_path, "from torchrec.distributed import shard\nshard()")
    with pytest.raises(CaptureError, match=r"ValueError: wrong device \(of torchrec's .* dlrm\)"):
        capture(CaptureRequest(script, (), 8))


def test_a_script_that_catches_everything_is_captured(tmp_path: Path) -> None:
    text = f"""{ONE_STEP}
while True:
    try:
        optimizer.step()
    except BaseException as error:
        print("caught", error)
"""
    (rank,) = capture(CaptureRequest(written(tmp_path, text), (), 8, timeout_s=120.0)).ranks
    assert rank.rank == 0


def test_a_script_that_is_killed_names_its_line(tmp_path: Path) -> None:
    text = f"{ONE_STEP}\nimport os\nprint('far', flush=True)\nos.kill(os.getpid(), 11)"
    with pytest.raises(CaptureError, match=r"train.py:5: .* rank 0 ended .* \(killed by SIGSEGV\); .*: far"):
        capture(CaptureRequest(written(tmp_path, text), (), 8))


def test_a_script_that_does_not_end_is_ended(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="did not finish its steps within 1 s"):
        capture(CaptureRequest(written(tmp_path, "while True: pass"), (), 8, timeout_s=1.0))


def test_a_killed_capture_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    """However it ends; its script would go on for minutes."""
    (tmp_path / "temporary").mkdir()
    (tmp_path / "slow.py").write_text(
        f"import os, time\nopen('{tmp_path}/pid', 'w').write(str(os.getpid()))\ntime.sleep(300)"
    )
    code = (
        "import sys; from pathlib import Path\n"
        "from stepsight.dataset.capture.capturing_run import CaptureRequest, capture\n"
        "capture(CaptureRequest(Path(sys.argv[1]), (), 1))\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "slow.py")], env=environment)
    until = time.monotonic() + 60
    while time.monotonic() < until and not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
        time.sleep(0.1)
    child = Path("/proc", (tmp_path / "pid").read_text())
    parent.kill()
    parent.wait()
    until = time.monotonic() + 10
    while time.monotonic() < until and child.exists() and ") Z" not in (child / "stat").read_text():
        time.sleep(0.05)
    assert not child.exists() or ") Z" in (child / "stat").read_text()
    assert {path.name.partition("_")[0] for path in (tmp_path / "temporary").iterdir()} <= {"torchinductor"}  # torch's


SPARSE = """
    import torch
    from torch import nn
    bag, table = nn.EmbeddingBag(1000, 16, sparse=True, mode="sum"), nn.Embedding(1000, 16, sparse=True)
    optimizer = torch.optim.{optimizer}([*bag.parameters(), *table.parameters()], lr=0.1)
    for step in range(4):
        rows = torch.randint(1000, (8, 5))
        (bag(rows) + table(rows).mean(1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("optimizer", ["SGD", "SparseAdam"])
def test_sparse_gradients_touch_the_rows_that_were_looked_up(optimizer: str, tmp_path: Path) -> None:
    """40 of 1,000: a table's update costs what its gradient holds."""
    (tmp_path / "s.py").write_text(textwrap.dedent(SPARSE.format(optimizer=optimizer)))
    rank = capture(CaptureRequest(tmp_path / "s.py", (), 1)).ranks[0]
    updates = [call for call in rank.calls if call[0].startswith(("aten::add", "aten::clone", "aten::_coalesce"))]
    assert updates and all(max(shape, default=0) <= 40 for call in updates for shape in call[1] if shape)


def test_where_a_script_hangs_is_said(tmp_path: Path) -> None:
    """``_line_of_stack`` asks the process that runs it."""
    script, stack = written(tmp_path, "import time\ntime.sleep(60)"), tmp_path / "stack.txt"
    code = "import faulthandler as f, runpy, signal, sys; f.register(signal.SIGUSR1, open(sys.argv[2], 'w'));"
    process = subprocess.Popen([sys.executable, "-c", f"{code} runpy.run_path(sys.argv[1])", str(script), str(stack)])
    try:
        while not stack.exists():
            time.sleep(0.01)
        time.sleep(0.3)
        assert _line_of_stack(process, script, stack) == " (it is at train.py:2)"
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("world", "ranks"), [(0, ()), (8, (8,)), (8, (-1,))])
def test_a_world_has_its_ranks(world: int, ranks: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="must lie within"):
        CaptureRequest(written(tmp_path, ""), (), world, ranks=ranks)


A: Issued = ("a", "all_reduce", 16, "train.py:7")
B: Issued = ("b", "all_reduce", 16, "train.py:8")
PAIR = (0, 1)


def test_the_same_order_is_right() -> None:
    check_orders({0: {PAIR: [A, B]}, 1: {PAIR: [A, B]}, 2: {(2, 3): [B]}})


@pytest.mark.parametrize("theirs", [[B, A], [A], [A, B, B], [A, ("b", "all_reduce", 32, "")], []])
def test_another_order_would_never_end(theirs: list[Issued]) -> None:
    with pytest.raises(CaptureError, match="ranks 0 and 1 would wait for each other forever: as number"):
        check_orders({0: {PAIR: [A, B]}, 1: {PAIR: theirs}})


def test_names_of_groups_count_only_where_ranks_share_them() -> None:
    check_orders({0: {PAIR: [A, B]}, 1: {PAIR: [("c", *A[1:]), ("d", *B[1:])]}})


def test_a_record_is_read_by_ranks() -> None:
    record = {"groups": [["dp", [0, 1]], ["tp", [0, 2]]], "issued": [[0, *A], [1, *B], [0, *B]]}
    assert issued_by_group(record) == {(0, 1): [A, B], (0, 2): [B]}
