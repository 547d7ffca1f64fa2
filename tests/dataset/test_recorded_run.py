"""A step recorded on the spot by the profiler of the PyTorch that is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepsight.dataset.graph.rank_trace import RankTrace
from stepsight.dataset.traces.read_rank import read_kineto
from stepsight.testing import TraceReaderContract

torch = pytest.importorskip("torch")

BATCH, SEQ, HIDDEN, HEADS, VOCAB = 2, 16, 32, 4, 64
ROWS = BATCH * SEQ


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two micro-batches of a small transformer block, forward and backward, and its optimizer."""
    from torch import nn
    from torch.nn import functional as F
    from torch.profiler import ProfilerActivity, profile, record_function

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(VOCAB, HIDDEN)
            self.norm = nn.LayerNorm(HIDDEN)
            self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
            self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.table(tokens)
            heads = [part.view(BATCH, SEQ, HEADS, -1).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)]
            mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(BATCH, SEQ, HIDDEN)
            return self.head(F.gelu(x + self.out(mixed)))

    model = Block()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(VOCAB, (BATCH, SEQ))

    def step() -> None:
        with record_function("stepsight::segment label=step"):
            for micro_batch in range(2):
                facts = f"micro_batch={micro_batch} stage=0"
                with record_function(f"stepsight::segment label=forward {facts}"):
                    loss = F.cross_entropy(model(tokens).view(ROWS, VOCAB), tokens.view(ROWS))
                with record_function(f"stepsight::segment label=backward {facts}"):
                    loss.backward()
            with record_function("stepsight::segment label=optimizer"):
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

    step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        step()
    path = tmp_path_factory.mktemp("recorded") / "rank0.json.gz"
    profiler.export_chrome_trace(str(path))
    return path


class TestRecorded(TraceReaderContract):
    @pytest.fixture(autouse=True)
    def _where(self, recorded: Path) -> None:
        self.path = recorded

    def sample(self, folder: Path) -> Path:
        copy = folder / self.path.name
        copy.write_bytes(self.path.read_bytes())
        return copy

    def read(self, path: Path) -> RankTrace:
        return read_kineto(path)


def segment_works(trace: RankTrace, segment: int) -> list[str]:
    return [str(node.work) for node, span in zip(trace.program.nodes, trace.span, strict=True) if span == segment]


def test_a_recorded_step_is_what_the_model_does(recorded: Path) -> None:
    """Every op of forward, backward and optimizer, in order, with its sizes, and nothing else."""
    trace = read_kineto(recorded)
    assert [span.label for span in trace.spans] == ["forward", "backward", "forward", "backward", "optimizer"]
    attention = f"{BATCH}x{HEADS}x{HEADS}x{SEQ}x{SEQ}x{HIDDEN // HEADS}x1"
    assert segment_works(trace, 0) == [
        f"embedding[{ROWS}x{HIDDEN}x{VOCAB}]fp32",
        f"layer_norm[{ROWS}x{HIDDEN}]fp32",
        f"linear[{ROWS}x{3 * HIDDEN}x{HIDDEN}]fp32",
        f"attention[{attention}]fp32",
        f"linear[{ROWS}x{HIDDEN}x{HIDDEN}]fp32",
        f"add[{ROWS * HIDDEN}]fp32",
        f"gelu[{ROWS * HIDDEN}]fp32",
        f"linear[{ROWS}x{VOCAB}x{HIDDEN}]fp32",
        f"cross_entropy[{ROWS}x{VOCAB}]fp32",
    ]
    backward = segment_works(trace, 1)
    assert backward[0] == f"cross_entropy_backward[{ROWS}x{VOCAB}]fp32"
    assert sorted(backward[1:3]) == [
        f"linear_dgrad[{ROWS}x{VOCAB}x{HIDDEN}]fp32",
        f"linear_wgrad[{ROWS}x{VOCAB}x{HIDDEN}]fp32",
    ]
    assert backward[3:] == [
        f"gelu_backward[{ROWS * HIDDEN}]fp32",
        f"linear_dgrad[{ROWS}x{HIDDEN}x{HIDDEN}]fp32",
        f"linear_wgrad[{ROWS}x{HIDDEN}x{HIDDEN}]fp32",
        f"bias_grad[{ROWS}x{HIDDEN}]fp32",
        f"attention_backward[{attention}]fp32",
        f"copy[{ROWS * 3 * HIDDEN}]fp32",
        f"linear_dgrad[{ROWS}x{3 * HIDDEN}x{HIDDEN}]fp32",
        f"linear_wgrad[{ROWS}x{3 * HIDDEN}x{HIDDEN}]fp32",
        f"bias_grad[{ROWS}x{3 * HIDDEN}]fp32",
        f"layer_norm_backward[{ROWS}x{HIDDEN}]fp32",
        f"add[{ROWS * HIDDEN}]fp32",
        f"embedding_backward[{ROWS}x{HIDDEN}x{VOCAB}]fp32",
    ]
    numel = 2 * VOCAB * HIDDEN + 2 * HIDDEN + 4 * HIDDEN * HIDDEN + 4 * HIDDEN
    assert segment_works(trace, 4)[-1] == f"adamw[{numel}x8]fp32"
    assert trace.unclassified_s == 0.0


def test_a_second_micro_batch_adds_to_the_gradients(recorded: Path) -> None:
    """One more ``add`` per parameter tensor."""
    trace = read_kineto(recorded)
    first, second = ([work.split("[")[0] for work in segment_works(trace, index)] for index in (1, 3))
    assert second.count("add") == first.count("add") + 8
