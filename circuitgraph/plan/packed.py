"""Which quantised weights the kernels of a target can read as they are; the others are dequantised when they are loaded."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

from ..circuit.ir import Circuit, Storage
from ..circuit.narrow import slice_entry, specialize
from .fuse import fuse
from .ir import Group, Plan
from .schedule import Rule, regrouped


def unreadable(
    circuit: Circuit, pieces: Sequence[tuple[str, int]], target: str, rules: Sequence[Rule], required: Collection[str] = ()
) -> dict[str, str]:
    """Quantised weights that no rule's kernel reads in some program of `pieces` (entry, rows), and why.

    Of those that a declined group reads, few bytes are given up (`_sets`): a norm, an embedding or a router beside a product
    does not cost the product its weights. Those `required` are not given up: `schedule` refuses their group.
    """
    forms = [(specialize(slice_entry(circuit, entry), rows), entry, rows) for entry, rows in pieces]
    kept, given_up = dict(circuit.storage), dict[str, str]()

    def planned(form: tuple[Circuit, str, int], storage: Mapping[str, Storage]) -> Plan:
        """Groups depend on the storage, too."""
        narrowed, entry, rows = form
        return regrouped(fuse(narrowed.with_storage(storage), entry, rows, target), rules)[0]

    def suffices(form: tuple[Circuit, str, int], group: Group, names: Sequence[str]) -> bool:
        """Would what `group` computes be accepted without the storage of `names`?"""
        plan = planned(form, {name: storage for name, storage in kept.items() if name not in names})
        inside = {node.name for node in group.nodes}
        parts = [part for part in plan.groups if any(node.name in inside for node in part.nodes)]
        return all(_declined(plan, part, rules) is None for part in parts)

    def mend(form: tuple[Circuit, str, int]) -> bool:
        """Give up weights of the first declined group that has any."""
        plan = planned(form, kept)
        for group in plan.groups:
            names = [name for name in group.inputs if name in kept and name not in required]
            reason = _declined(plan, group, rules) if names else None
            if reason is not None:
                chosen = next((some for some in _sets(circuit, names) if suffices(form, group, some)), names)
                for name in chosen:
                    given_up[name] = reason
                    del kept[name]
                return True
        return False

    # What one program gives up splits siblings in the others: ask until none has to.
    while sum(mend(form) for form in forms):
        pass
    return given_up


def _sets(circuit: Circuit, names: Sequence[str]) -> list[tuple[str, ...]]:
    """Sets of weights that may be given up, of few bytes first: one, two, or so many of the smallest."""
    rising = sorted(names, key=circuit.stored_bytes)
    few = [some for count in (1, 2) for some in itertools.combinations(rising, count)]
    more = [tuple(rising[:count]) for count in range(3, len(rising))]
    return sorted(few + more, key=lambda some: sum(circuit.stored_bytes(name) for name in some))


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
