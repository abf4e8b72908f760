"""Which quantised weights the kernels of a target can read as they are; the others are dequantised when they are loaded."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ..circuit.ir import Circuit
from ..circuit.narrow import slice_entry, specialize
from .fuse import fuse
from .ir import Group, Plan
from .schedule import Rule


def unreadable(
    circuit: Circuit, pieces: Sequence[tuple[str, int]], target: str, rules: Sequence[Rule], required: Collection[str] = ()
) -> dict[str, str]:
    """Quantised weights that no rule's kernel reads in some program of `pieces` (entry, rows), and why.

    Weights that one group reads go together. Those `required` are not given up: `schedule` refuses their group.
    """
    plans = [fuse(specialize(slice_entry(circuit, entry), rows), entry, rows, target) for entry, rows in pieces]
    given_up: dict[str, str] = {}
    while True:
        kept = {name: storage for name, storage in circuit.storage.items() if name not in given_up}
        more: dict[str, str] = {}
        for plan in plans:
            now = replace(plan, circuit=plan.circuit.with_storage(kept))
            for group in plan.groups:
                names = [name for name in group.inputs if name in kept and name not in required]
                reason = _declined(now, group, rules) if names else None
                if reason is not None:
                    more.update(dict.fromkeys(names, reason))
        if not more:
            return given_up
        given_up.update(more)


def _declined(plan: Plan, group: Group, rules: Sequence[Rule]) -> str | None:
    """The reasons of all rules, None where one accepts."""
    reasons = []
    for rule in rules:
        if group.pattern in rule.patterns:
            reason = rule.declines(plan, group)
            if reason is None:
                return None
            reasons.append(f"{rule.name}: {reason}")
    return "; ".join(reasons) or f"no rule for pattern '{group.pattern}'"
