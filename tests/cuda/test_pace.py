"""Rings are filled at a pace before the wait, unless they hold all that their block has."""

from __future__ import annotations

import re

import pytest

from circuitgraph.kernels.cuda.stream import PACE
from tests.cuda.test_emit import kernels_of, source_of
from tests.cuda.test_quantised import plan_of

MORE_THAN_RINGS_HOLD = 16384
"""Rows of a head of 1024 columns: 512 tiles of 32 for 132 blocks."""


def pauses(kernel: str) -> list[int]:
    """How many copies may be on the way at each pause before the wait, in order."""
    before, _ = kernel.split("griddepcontrol_wait();", 1)
    return [int(most) for most in re.findall(r"cp_async_wait_group\w*_(\d+)\(", before)]


@pytest.mark.parametrize(("vocabulary", "paced"), [(MORE_THAN_RINGS_HOLD, True), (2112, False)])
def test_a_head_has_few_stages_on_the_way(vocabulary, paced):
    kernels = kernels_of(source_of(plan_of({}, 4, vocab_size=vocabulary)))
    (head,) = [text for text in kernels if "lm_head" in text]
    assert set(pauses(head)) == ({PACE} if paced else set())


def test_old_cache_rows_come_by_halves_of_a_tile():
    kernels = kernels_of(source_of(plan_of({}, 4)))
    (attention,) = [text for text in kernels if "kv_length_ptr" in text and "cp_async" in text.split("griddepcontrol_wait();")[0]]
    assert len(pauses(attention)) >= 3
    assert set(pauses(attention)) == {1}
