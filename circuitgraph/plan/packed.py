"""Which quantised weights the kernels of a target can read as they are; the others are dequantised when they are loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ..circuit.ir import Circuit, Storage
from ..circuit.narrow import slice_entry, specialize
from .fuse import fuse
from .ir import Group, Plan
from .schedule import Rule


def unreadable(
    circuit: Circuit, pieces: Sequence[tuple[str, int]], target: str, rules: Sequence[Rule], required: Collection[str] = ()
) -> dict[str, str]:
    """Quantised weights that no rule's kernel reads in some program of `pieces` (entry, rows), and why.

    Of several that a declined group reads one is given up, if that suffices, else all: a norm or an embedding in front of a
    product does not cost the product its weights. Those `required` are not given up: `schedule` refuses their group.
    """
    plans = [fuse(specialize(slice_entry(circuit, entry), rows), entry, rows, target) for entry, rows in pieces]
    given_up: dict[str, str] = {}
    while True:
        kept = {name: storage for name, storage in circuit.storage.items() if name not in given_up}
        more: dict[str, str] = {}
        for plan in plans:
            for group in plan.groups:
                names = [name for name in group.inputs if name in kept and name not in required]
                reason = _declined(_holding(plan, kept), group, rules) if names else None
                if reason is None:
                    continue
                without = ({other: kind for other, kind in kept.items() if other != name} for name in names)
                enough = (
                    name for name, rest in zip(names, without, strict=True) if not _declined(_holding(plan, rest), group, rules)
                )
                one = next(enough, None)
                more.update(dict.fromkeys(names if one is None else [one], reason))
        if not more:
            return given_up
        given_up.update(more)


def _holding(plan: Plan, storage: Mapping[str, Storage]) -> Plan:
    return replace(plan, circuit=plan.circuit.with_storage(storage))


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
