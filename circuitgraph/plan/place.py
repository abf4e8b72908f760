"""Stage `place`: an offset in one workspace for every value that crosses groups and for every group's scratch.

Two of them share bytes only when their live ranges do not meet. The workspace never moves (CUDA graphs keep its
address), so the offsets are part of the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..circuit.types import TensorType
from ..errors import CircuitError, Fault
from .ir import Plan, Slot

ALIGNMENT = 64


@dataclass(frozen=True)
class _Range:
    """A value's bytes and the groups (by index, ends included) during which they must stay."""

    name: str
    bytes: int
    first: int
    last: int

    def meets(self, other: _Range) -> bool:
        return self.first <= other.last and other.first <= self.last


def place(plan: Plan) -> Plan:
    """Largest first, each at the lowest offset that is free during its life."""
    slots: dict[str, Slot] = {}
    placed: list[_Range] = []
    for item in sorted(live_ranges(plan), key=lambda r: (-r.bytes, r.first, r.name)):
        busy = sorted((slots[other.name] for other in placed if other.meets(item)), key=lambda slot: slot.offset)
        offset = 0
        for slot in busy:
            if offset + item.bytes <= slot.offset:
                break
            offset = max(offset, _align(slot.offset + slot.bytes))
        slots[item.name] = Slot(offset, item.bytes)
        placed.append(item)
    total = max((_align(slot.offset + slot.bytes) for slot in slots.values()), default=ALIGNMENT)
    ordered = dict(sorted(slots.items(), key=lambda pair: (pair[1].offset, pair[0])))
    done = replace(plan, slots=ordered, workspace_bytes=total)
    verify_placement(done)
    return done


def live_ranges(plan: Plan) -> list[_Range]:
    """One range per stored value that is neither the caller's nor inside one group, and per scratch buffer."""
    owned_by_caller = {plan.storage(name) for _, name in plan.circuit.outputs}
    owned_by_caller |= {source.name for source in plan.circuit.sources()}
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for index, group in enumerate(plan.groups):
        for name in group.made:
            first.setdefault(plan.storage(name), index)
            last[plan.storage(name)] = index
        for name in group.inputs:
            last[plan.storage(name)] = index
    crossing = {plan.storage(name) for group in plan.groups for name in plan.crossing(group)}
    ranges = []
    for name in first:
        value_type = plan.circuit.types[name]
        if name in crossing and name not in owned_by_caller and isinstance(value_type, TensorType):
            ranges.append(_Range(name, value_type.bytes(), first[name], last[name]))
    for index, (group, items) in enumerate(zip(plan.groups, plan.scratch, strict=True)):
        ranges += [_Range(f"{group.name}/{item.name}", item.type.bytes(), index, index) for item in items]
    return ranges


def verify_placement(plan: Plan) -> None:
    """No two live values overlap, everything is aligned and inside the workspace.

    Raises:
        CircuitError: otherwise; this is a fault of the compiler.
    """
    ranges = live_ranges(plan)
    faults = []
    for index, item in enumerate(ranges):
        slot = plan.slots[item.name]
        if slot.offset % ALIGNMENT or slot.offset + slot.bytes > plan.workspace_bytes or slot.bytes != item.bytes:
            faults.append(Fault(f"is badly placed at {slot.offset}", where=plan.symbol, subject=item.name))
        for other in ranges[:index]:
            there = plan.slots[other.name]
            apart = slot.offset + slot.bytes <= there.offset or there.offset + there.bytes <= slot.offset
            if item.meets(other) and not apart:
                faults.append(
                    Fault(f"shares bytes with '{other.name}' while both are live", where=plan.symbol, subject=item.name)
                )
    if faults:
        raise CircuitError(faults)


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
