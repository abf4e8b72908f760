"""What measures on a GPU: the read kernel, in every shape that the bench tries."""

from __future__ import annotations

import pytest
import torch

from circuitgraph.errors import CircuitgraphError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_every_read_kernel_reads_everything():
    """Making the probe checks each; a word that changes between two passes shows."""
    from circuitgraph.measure.gpu import READINGS, ReadCeiling

    probe = ReadCeiling(size=256 << 20, rounds=2)
    assert set(probe.tried) == set(READINGS)
    probe()
    probe.check()
    probe.buffer[12345] += 1
    probe()
    with pytest.raises(CircuitgraphError, match="did not read its buffer"):
        probe.check()


def test_times_leave_the_launch_out():
    """A graph of one tiny kernel takes a few microseconds, not what its launch costs the host."""
    from circuitgraph.measure.gpu import medians, record, take_turns

    value = torch.zeros(1, device="cuda")
    assert medians(take_turns({"add": record(lambda: value.add_(1))}, 20))["add"] < 20e-6
