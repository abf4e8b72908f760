"""The workspace: live values never share bytes, dead ones do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from circuitgraph.circuit.narrow import slice_entry, specialize
from circuitgraph.errors import CircuitError
from circuitgraph.language import parse_circuit
from circuitgraph.plan.fuse import fuse
from circuitgraph.plan.ir import Slot
from circuitgraph.plan.place import live_ranges, place, verify_placement


def chain(links: list[tuple[int, int]]):
    """A program of products: link i reads value `source` and makes one more of 16 * (1 + i % 3) columns."""
    widths, lines, weights = [16], [], []
    for index, (source, _) in enumerate(links):
        out = 16 * (1 + index % 3)
        weights.append(f'  w{index}: "bf16[{out}, {widths[source]}]"')
        lines.append(f"  - v{index + 1} = linear(v{source}, w{index})")
        widths.append(out)
    names = ", ".join(f"v{i}: v{i}" for i in range(1, len(links) + 1) if i == len(links) or links[i - 1][1])
    outputs = ", ".join(part.split(":")[0] for part in names.split(", "))
    text = "program: chain\ninputs: {v0: 'f32[n, 16]'}\nweights:\n" + "\n".join(weights) + "\nbody:\n" + "\n".join(lines)
    return parse_circuit(f"{text}\noutputs: {{{names}}}\nentries: {{run: {{outputs: [{outputs}]}}}}\n")


@st.composite
def links(draw):
    count = draw(st.integers(1, 9))
    return [(draw(st.integers(max(0, i - 3), i)), draw(st.integers(0, 1))) for i in range(count)]


@given(links(), st.integers(1, 9))
@settings(max_examples=60)
def test_random_programs_are_placed_without_overlap(shape, rows):
    circuit = specialize(slice_entry(chain(shape), "run"), rows)
    plan = placed(circuit, rows)
    verify_placement(plan)
    assert plan.workspace_bytes <= sum(-(-item.bytes // 64) * 64 for item in live_ranges(plan)) + 64


def placed(circuit, rows):
    plan = fuse(circuit, "run", rows, "cpu")
    return place(replace(plan, scratch=((),) * len(plan.groups)))


def test_dead_values_give_their_bytes_back():
    circuit = specialize(slice_entry(chain([(i, 0) for i in range(9)]), "run"), 4)
    plan = placed(circuit, 4)
    assert plan.workspace_bytes < sum(item.bytes for item in live_ranges(plan))


def test_verifier_refuses_an_overlap():
    circuit = specialize(slice_entry(chain([(0, 0), (1, 0), (1, 0), (3, 0)]), "run"), 4)
    plan = placed(circuit, 4)
    broken = {name: Slot(0, slot.bytes) for name, slot in plan.slots.items()}
    with pytest.raises(CircuitError, match=r"^run_4: v\d: shares bytes with 'v\d' while both are live$"):
        verify_placement(replace(plan, slots=broken))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda slot: Slot(slot.offset + 4, slot.bytes),
        lambda slot: Slot(1 << 20, slot.bytes),
        lambda slot: Slot(slot.offset, slot.bytes - 1),
    ],
    ids=["unaligned", "outside", "short"],
)
def test_verifier_refuses_a_slot_that_is_none(wrong):
    plan = placed(specialize(slice_entry(chain([(0, 0), (1, 0), (1, 0), (3, 0)]), "run"), 4), 4)
    name = next(iter(plan.slots))
    verify_placement(plan)
    with pytest.raises(CircuitError, match=rf"^run_4: {name}: is badly placed at \d+"):
        verify_placement(replace(plan, slots={**plan.slots, name: wrong(plan.slots[name])}))
