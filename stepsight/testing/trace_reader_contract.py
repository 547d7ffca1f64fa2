"""The contract of readers of traces."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.graph.program import Dependency
from stepsight.dataset.graph.rank_trace import RankTrace
from stepsight.dataset.kinds.op import Collective, Op


class TraceReaderContract:
    """Tests that every reader of traces passes.

    Subclass it in a test module, write a sample and read it::

        from stepsight.testing import TraceReaderContract

        class TestMyReader(TraceReaderContract):
            def sample(self, folder):
                return Path(shutil.copy("samples/rank0.mine", folder))

            def read(self, path):
                return read_mine(path)

    Attributes:
        on_host: Whether ops run on the host.  There a slot is all the time since the end of the op before.
    """

    on_host = True

    def sample(self, folder: Path) -> Path:
        """Write a trace that holds at least one op, and return its path."""
        raise NotImplementedError

    def read(self, path: Path) -> RankTrace:
        """Read a trace with the reader under test."""
        raise NotImplementedError

    @pytest.fixture
    def trace(self, tmp_path: Path) -> RankTrace:
        return self.read(self.sample(tmp_path))

    def test_every_node_has_its_times(self, trace: RankTrace) -> None:
        """All arrays are as long as the program, finite, and no time is negative."""
        n = len(trace.program)
        assert n > 0
        for values in (trace.start_s, trace.duration_s, trace.slot_s, trace.wait_s, trace.num_events):
            assert values.shape == (n,)
            assert np.isfinite(values).all()
        assert (trace.duration_s >= 0).all() and (trace.slot_s >= 0).all() and (trace.wait_s >= -1e-12).all()
        assert trace.span.shape == (n,) and trace.tail_s.shape == (len(trace.spans),)

    def test_nodes_are_work(self, trace: RankTrace) -> None:
        """Nodes are ops and collectives on named streams; collectives know whom they meet."""
        for index, node in enumerate(trace.program.nodes):
            assert isinstance(node.work, Op | Collective) and node.stream
            assert (index in trace.meets) == isinstance(node.work, Collective)

    def test_what_waits_comes_later(self, trace: RankTrace) -> None:
        """Edges go forward, and stream order is left to the program."""
        for before, after, why in trace.program.edges:
            assert before < after and why is not Dependency.STREAM_ORDER

    def test_slots_fill_their_segment(self, trace: RankTrace) -> None:
        """On a host, slots of the compute stream and waits add up to the time from a segment's begin to its end."""
        if not self.on_host:
            return
        for index, span in enumerate(trace.spans):
            nodes = (trace.span == index) & trace.is_compute
            if nodes.any():
                filled = trace.slot_s[nodes].sum() + trace.wait_s[nodes].sum() + trace.tail_s[index]
                # Times since boot, as floating-point seconds, resolve about a nanosecond.
                assert filled == pytest.approx(span.end_s - span.start_s, rel=1e-6, abs=2e-9)

    def test_segments_are_in_order(self, trace: RankTrace) -> None:
        starts = [span.start_s for span in trace.spans]
        assert starts == sorted(starts)
        assert trace.span.max(initial=-1) < len(trace.spans)

    def test_reading_again_is_the_same(self, tmp_path: Path) -> None:
        path = self.sample(tmp_path)
        first, second = self.read(path), self.read(path)
        assert first.program.digest_key == second.program.digest_key
        assert np.array_equal(first.slot_s, second.slot_s)

    @pytest.mark.parametrize("damage", ["absent", "empty", "cut", "flipped", "not json", "other json"])
    def test_a_damaged_file_is_refused_in_one_line(self, tmp_path: Path, damage: str) -> None:
        """Nothing is half-read: the error names the file, in one line."""
        path = self.sample(tmp_path)
        whole = path.read_bytes()
        if damage == "absent":
            path.unlink()
        else:
            packed = path.suffix == ".gz"
            bad = {
                "empty": b"",
                "cut": whole[: len(whole) // 2],
                "flipped": whole[:40] + bytes(byte ^ 0xFF for byte in whole[40:60]) + whole[60:],
                "not json": gzip.compress(b"a trace") if packed else b"a trace",
                "other json": gzip.compress(b'{"a": 1}') if packed else b'{"a": 1}',
            }[damage]
            path.write_bytes(bad)
        with pytest.raises(TraceError) as caught:
            self.read(path)
        assert path.name in str(caught.value) and "\n" not in str(caught.value)
