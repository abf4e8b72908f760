"""Stage `schedule`: the kernel and parameters of every group, by the first rule of schedules/<target>.yaml that accepts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ..errors import Fault, Location, ScheduleError, did_you_mean
from ..kernels import register_kernels
from ..kernels.base import Kernel, kernels_of, make_params
from ..language.source import read_yaml
from ..places import check_schedule
from .fuse import CACHE, PATTERNS, ROWS, fuse
from .ir import Choice, Group, Plan

SCHEDULES = Path(str(resources.files("circuitgraph.schedules")))


class RuleDecl(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    patterns: list[str] = Field(min_length=1)
    rows: str = "1-"
    kernel: str
    params: dict[str, Any] = Field(default_factory=dict)
    why: str = ""


class ScheduleFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str
    doc: str = ""
    rules: list[RuleDecl] = Field(min_length=1)


@dataclass(frozen=True)
class Rule:
    """One line of a schedule file, checked."""

    name: str
    patterns: tuple[str, ...]
    first: int
    last: int | None
    kernel: type[Kernel]
    params: Any
    where: Location

    def declines(self, plan: Plan, group: Group) -> str | None:
        """Why this rule is not for `group`, or None. Rules for other patterns are not asked."""
        if plan.rows < self.first or (self.last is not None and plan.rows > self.last):
            return f"for {self.first}-{self.last or ''} rows"
        return self.kernel.refuse(plan, group, self.params)


def load_schedule(target: str, path: Path | None = None) -> tuple[Rule, ...]:
    """The rules of a target, or of the file `path`.

    Raises:
        ScheduleError: the file does not load, or names a kernel, pattern or parameter that does not exist.
    """
    check_schedule(path)
    path = path or SCHEDULES / f"{target}.yaml"
    if not path.is_file():
        known = [file.stem for file in SCHEDULES.glob("*.yaml")]
        raise ScheduleError(Fault(f"no schedule for target '{target}'", where=str(path.name), hint=did_you_mean(target, known)))
    register_kernels(target)
    file, places = read_yaml(path, ScheduleFile, ScheduleError)
    faults: list[Fault] = []
    rules = []
    patterns, kernels = {pattern.name for pattern in PATTERNS} | {ROWS, CACHE}, kernels_of(target)
    if file.target != target:
        faults.append(Fault("the schedule is for another target", where=places["target",], expected=target, got=file.target))
    for index, decl in enumerate(file.rules):
        where = places["rules", index]
        for name in decl.patterns:
            if name not in patterns:
                faults.append(Fault(f"no pattern '{name}'", where=where, hint=did_you_mean(name, patterns)))
        template = kernels.get(decl.kernel)
        if template is None:
            problem, hint = f"no kernel '{decl.kernel}' for target '{target}'", did_you_mean(decl.kernel, kernels)
            faults.append(Fault(problem, where=where, subject=decl.name, hint=hint))
            continue
        foreign = [name for name in decl.patterns if name in patterns and name not in template.patterns]
        if foreign:
            problem, expected = f"kernel {template.name} is not for this pattern", " or ".join(template.patterns)
            faults.append(Fault(problem, where=where, subject=decl.name, expected=expected, got=", ".join(foreign)))
            continue
        bounds = _range(decl.rows)
        if bounds is None:
            expected = "'first-last', 'first-' or one number, from 1 on and rising"
            faults.append(Fault("are no rows", where=where, subject=decl.name, expected=expected, got=repr(decl.rows)))
            continue
        try:
            params = make_params(template, decl.params, where)
        except ScheduleError as error:
            faults.extend(error.faults)
            continue
        rules.append(Rule(decl.name, tuple(decl.patterns), *bounds, template, params, where))
    if faults:
        raise ScheduleError(faults)
    return tuple(rules)


def regrouped(plan: Plan, rules: Sequence[Rule]) -> tuple[Plan, dict[str, list[tuple[str, str]]]]:
    """The plan without those groups of optional patterns that no rule accepts: their nodes are in groups of other patterns. And
    what each rule objected to, by the anchors of these groups."""
    declined: dict[str, list[tuple[str, str]]] = {}
    while refused := _refused(plan, rules):
        declined |= refused
        plan = fuse(plan.circuit, plan.entry, plan.rows, plan.target, declined)
    return plan, declined


def _refused(plan: Plan, rules: Sequence[Rule]) -> dict[str, list[tuple[str, str]]]:
    """As `regrouped`, of the first optional pattern alone that has such groups: the next one may take what these leave."""
    refused: dict[str, list[tuple[str, str]]] = {}
    for pattern in (pattern.name for pattern in PATTERNS if pattern.optional):
        asked = [rule for rule in rules if pattern in rule.patterns]
        for group in (group for group in plan.groups if group.pattern == pattern):
            reasons = [(rule.name, rule.declines(plan, group)) for rule in asked]
            if all(reason is not None for _, reason in reasons):
                said = [(name, f"{reason} ({pattern})") for name, reason in reasons]
                refused |= {anchor.name: said for anchor in group.anchors}
        if refused:
            break
    return refused


def schedule(plan: Plan, rules: tuple[Rule, ...]) -> Plan:
    """Give every group its kernel. Groups of optional patterns that none is for are cut anew.

    Raises:
        ScheduleError: groups that no rule accepts, with every rule's reason.
    """
    choices, scratch, faults = [], [], []
    plan, declined = regrouped(plan, rules)
    for group in plan.groups:
        refusals = next((list(declined[anchor.name]) for anchor in group.anchors if anchor.name in declined), [])
        for rule in rules:
            if group.pattern not in rule.patterns:
                continue
            reason = rule.declines(plan, group)
            if reason is not None:
                refusals.append((rule.name, reason))
                continue
            params = tuple((field.name, getattr(rule.params, field.name)) for field in dataclasses.fields(rule.params))
            choices.append(Choice(rule.name, rule.kernel.name, params, tuple(refusals)))
            scratch.append(rule.kernel.scratch(plan, group, rule.params))
            break
        else:
            nodes = ", ".join(f"{node.name} = {node.op}" for node in group.nodes)
            reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals) or f"no rule for pattern '{group.pattern}'"
            where = group.nodes[0].where or plan.symbol
            faults.append(Fault(f"no rule for '{plan.target}' accepts group {group.name} ({nodes})", where=where, hint=reasons))
    if faults:
        raise ScheduleError(faults)
    return dataclasses.replace(plan, choices=tuple(choices), scratch=tuple(scratch))


def _range(text: str) -> tuple[int, int | None] | None:
    first, dash, last = (part.strip() for part in text.partition("-"))
    if not all(part.isascii() and part.isdigit() for part in (first, last or "0")):
        return None
    low = int(first)
    high = (int(last) if last else None) if dash else low
    return None if low < 1 or (high is not None and high < low) else (low, high)
