"""`verify`: every compiled program against the reference interpreter, and the proof that a wrong weight would be seen."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..artifact.manifest import Function, Manifest
from ..artifact.store import read_artifact
from ..circuit.narrow import slice_entry
from ..ops import TORCH_DTYPES
from ..ops.cache import Sight
from ..runtime.compiled import open_library
from .calls import call_function
from .cases import Case, Span, make_case
from .compare import Comparison, compare_caches, compare_outputs, compare_same_bits
from .truth import reference
from .weights import bind_where_recorded

Observer = Callable[[str, int, int], None]

OPEN_BLOCK_SIZES = (16, 5)
"""Block sizes to try where the program leaves them open; an odd one shows arithmetic that assumes a power of two."""

LONGEST = 1 << 14
"""Cache rows of a trial: beyond the edge of windows that are wider is nothing to be seen."""
CONTROL_WEIGHTS = 5
PERTURBED_BYTES = 0.1
"""Share of a quantised weight's bytes that the control changes."""
PERTURBATION = 0.25
"""Noise on a wrong weight, in units of its root mean square or of SMALLEST_RMS."""
SMALLEST_RMS = 0.1
EFFECTIVE = 4.0
"""A wrong weight must move the reference by so many tolerances to count."""


@dataclass(frozen=True)
class Check:
    """The worst of all trials of one comparison. `error` is in units of max(1, rms of the reference)."""

    entry: str
    rows: int
    name: str
    error: float
    tolerance: float
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Control:
    """One weight was perturbed, and verification had to fail. `error` and `tolerance` are of the check that saw it best."""

    weight: str
    seen_by: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the wrong weight was noticed."""
        return self.error > self.tolerance


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` found. It passed when every check did and every wrong weight was noticed."""

    artifact: str
    program: str
    seed: int
    checks: tuple[Check, ...]
    controls: tuple[Control, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks) and bool(self.controls) and all(c.passed for c in self.controls)

    def to_json(self) -> dict[str, Any]:
        """Plain data; an infinite error is written as the text "inf"."""
        data = asdict(self)
        for kind, items in (("checks", self.checks), ("controls", self.controls)):
            for record, item in zip(data[kind], items, strict=True):
                record["passed"] = item.passed
                if record["error"] == float("inf"):
                    record["error"] = "inf"
        return {**json.loads(json.dumps(data)), "passed": self.passed}


def verify(
    artifact: str | Path,
    *,
    model: str | Path | None = None,
    target_model: str | Path | None = None,
    weights: Mapping[str, torch.Tensor] | None = None,
    threads: int | None = None,
    seed: int = 0,
    observer: Observer | None = None,
) -> VerifyReport:
    """Call every compiled program on fresh random inputs and compare with the reference interpreter.

    Rows have unequal contexts (0, 1, around block edges, several blocks), block tables are shuffled, cache rows that
    nobody may read are NaN, and so are outputs and workspace before the call. Checked are every output, the cache rows
    that had to be written, that no other cache byte changed, that a row alone gives what it gives among others, and,
    bit for bit, that it does not depend on its neighbours. Then a few weights are perturbed, one at a time: each must
    make the comparison fail. Weights that the reference does not depend on either (behind a zero, say) are passed over.

    Args:
        artifact: the folder or zip that `compile` wrote.
        model: the drafter's checkpoint folder; where it was compiled from when left out. An artifact of a bare config
            has random weights and needs none.
        target_model: the folder that the drafter borrows from; it may hold GGUF.
        weights: tensors by circuit name, instead of a folder's.
        observer: called with (program, programs done, programs in all).

    Raises:
        CircuitgraphError: the artifact or its weights do not load. A difference is no exception: see the report.
    """
    opened = read_artifact(artifact)
    manifest = opened.manifest
    bound = bind_where_recorded(opened, model=model, target_model=target_model, weights=weights, seed=seed)
    subject = _Subject(manifest, open_library(opened, threads=threads), bound, torch.Generator().manual_seed(seed))
    checks: list[Check] = []
    functions = sorted(manifest.functions.values(), key=lambda function: (function.entry, function.rows))
    for done, function in enumerate(functions):
        if observer:
            observer(function.symbol, done, len(functions) + 1)
        checks += subject.check(function)
    if observer:
        observer("control", len(functions), len(functions) + 1)
    return VerifyReport(str(artifact), manifest.program, seed, tuple(checks), tuple(subject.control(functions)))


@dataclass
class _Subject:
    manifest: Manifest
    functions: Mapping[str, Callable[..., Any]]
    weights: dict[str, torch.Tensor]
    generator: torch.Generator

    def check(self, function: Function) -> list[Check]:
        worst: dict[str, Comparison] = {}
        for index, (rows, spans) in enumerate(self._trials(function)):
            case = self._case(function, rows, spans, index)
            for name, comparison in self._compare(function, case):
                if name not in worst or comparison.worse_than(worst[name]):
                    worst[name] = comparison
        return [Check(function.entry, function.rows, name, c.error, c.tolerance, c.detail) for name, c in worst.items()]

    def control(self, functions: Sequence[Function]) -> Iterator[Control]:
        """Perturb some weights that the first program with outputs reads, first and last among them if they matter."""
        function = next((f for f in functions if self.manifest.circuit.entry(f.entry).outputs), functions[0])
        names = [arg.name for arg in function.args if arg.role == "weight"]
        step = max(1, (len(names) - 1) // max(1, CONTROL_WEIGHTS - 1))
        case = self._case(function, function.rows, self._control_spans(function), 0)
        wanted = self._reference(function, case, self.weights)
        counted = 0
        for name in dict.fromkeys([*names[::step][: CONTROL_WEIGHTS - 1], *names[-1:], *names]):
            if counted == CONTROL_WEIGHTS:
                return
            wrong = {**self.weights, name: self._perturbed(name)}
            moved, caches = self._reference(function, case, wrong)
            outputs = {public: moved[public] for public in self.manifest.circuit.entry(function.entry).outputs}
            _, effect = self._worst(case, (outputs, caches), wanted)
            if not effect.error > EFFECTIVE * effect.tolerance:
                continue
            counted += 1
            check, comparison = self._worst(case, self._call(function, case, wrong), wanted)
            yield Control(name, check, comparison.error, comparison.tolerance)

    def _perturbed(self, name: str) -> torch.Tensor:
        right = self.weights[name]
        if right.dtype == torch.uint8:  # of a quantised weight: another sign here and there, or another power of two
            some = torch.rand(right.shape, generator=self.generator) < PERTURBED_BYTES
            storage = self.manifest.circuit.storage[name.removesuffix(".scales")]
            powers = storage.format == "mxfp4" and name.endswith(".scales")
            return torch.where(some, right - 1 if powers else right ^ 128, right)
        if not right.dtype.is_floating_point:  # ids: each the next one's, so that none leaves its range
            return right.roll(1)
        values = right.float()
        scale = max(float(values.square().mean().sqrt()), SMALLEST_RMS)
        return (values + PERTURBATION * scale * torch.randn(values.shape, generator=self.generator)).to(right.dtype)

    # -- trials ------------------------------------------------------------------------------------------------

    def _block_size(self, function: Function, trial: int) -> int:
        sizes = {arg.shape[3] for arg in function.args if arg.role == "state" and len(arg.shape) == 5}
        fixed = [size for size in sizes if isinstance(size, int)]
        return fixed[0] if fixed else OPEN_BLOCK_SIZES[trial % len(OPEN_BLOCK_SIZES)]

    def _case(self, function: Function, rows: int, spans: Sequence[Span], trial: int) -> Case:
        return make_case(
            slice_entry(self.manifest.circuit, function.entry),
            rows,
            spans,
            block_size=self._block_size(function, trial),
            generator=self.generator,
            max_position=self.manifest.max_position,
        )

    def _together(self, function: Function) -> int:
        """Rows of a sequence that draft at once."""
        return min(self.manifest.circuit.block_of(function.entry), function.rows)

    def _control_spans(self, function: Function) -> list[Span]:
        together = self._together(function)
        return [Span(3 + index % 5, together) for index in range(function.rows // together)]

    def _trials(self, function: Function) -> Iterator[tuple[int, list[Span]]]:
        rows, block = function.rows, self._block_size(function, 0)
        if self.manifest.circuit.entry(function.entry).rows == "context":
            yield rows, [Span(0, rows)]
            yield rows, [Span(block + 1, rows, start=2)]
            yield rows, [Span(0, max(1, rows // 2))]
            if rows >= 3:
                yield rows, [Span(block - 1, rows // 3), Span(0, rows // 3, start=1), Span(1, 1)]
            return
        edges = [0, 1, block - 1, block, block + 1, 3 * block + 2, 2, 70, *self._window_edges(function)]
        starts, together = [0, 0, 0, 3, 1], self._together(function)
        spans = [Span(context, together, starts[index % len(starts)]) for index, context in enumerate(edges)]
        sequences = rows // together
        for first in range(0, len(edges), sequences):
            yield rows, [spans[(first + index) % len(spans)] for index in range(sequences)]
        if sequences > 1:
            yield rows, spans[2 : 2 + sequences // 2]
        if together > 1:  # a block that ends early, as at the position limit
            yield rows, [*spans[3 : 2 + sequences], Span(block, together - together // 3)]

    def _window_edges(self, function: Function) -> Iterator[int]:
        """Contexts around the windows that its rows have, as far as their caches fit a machine."""
        nodes = slice_entry(self.manifest.circuit, function.entry).nodes
        for window in sorted({Sight.of(node.attr).window for node in nodes if node.op == "attention"} - {0}):
            yield from (window - self._together(function), window, window + 1) if window <= LONGEST else ()

    # -- comparisons -------------------------------------------------------------------------------------------

    def _call(self, function: Function, case: Case, weights: Mapping[str, torch.Tensor]) -> tuple[dict, dict]:
        caches = case.copy_caches()
        code = self.functions[function.symbol]
        return call_function(function, code, inputs=case.inputs, caches=caches, weights=weights), caches

    def _reference(self, function: Function, case: Case, weights: Mapping[str, torch.Tensor]) -> tuple[dict, dict]:
        caches = case.copy_caches()
        made = reference(self.manifest.circuit, function.entry, case, weights, caches)
        return made, caches

    def _pairs(self, case: Case, made: tuple[dict, dict], wanted: tuple[dict, dict]) -> Iterator[tuple[str, Comparison]]:
        """Outputs and caches of two runs."""
        yield from compare_outputs(made[0], wanted[0], case.live, TORCH_DTYPES[self.manifest.circuit.act])
        yield from compare_caches(case, made[1], wanted[1])

    def _worst(self, case: Case, made: tuple[dict, dict], wanted: tuple[dict, dict]) -> tuple[str, Comparison]:
        return max(self._pairs(case, made, wanted), key=lambda item: item[1].error / max(item[1].tolerance, 1e-9))

    def _compare(self, function: Function, case: Case) -> Iterator[tuple[str, Comparison]]:
        """Compiled against reference, and a sequence of it against the same one elsewhere."""
        act, weights = TORCH_DTYPES[self.manifest.circuit.act], self.weights
        made, caches = self._call(function, case, weights)
        wanted, reference_caches = self._reference(function, case, weights)
        yield from self._pairs(case, (made, caches), (wanted, reference_caches))
        if self.manifest.circuit.entry(function.entry).rows == "context" or case.live < 2:
            return
        together = self._together(function)
        first = int(torch.randint(-(-case.live // together), (), generator=self.generator)) * together
        rows = list(range(first, min(first + together, case.live)))  # of one sequence
        quiet, _ = self._call(function, _with_idle_others(case, rows), weights)
        yield "isolated", Comparison.worst(compare_same_bits(made, quiet, row) for row in rows)
        single = next((f for f in self.manifest.functions.values() if (f.entry, f.rows) == (function.entry, len(rows))), None)
        if single is not None and single is not function:
            alone, _ = self._call(single, case.only(rows), weights)
            here = {name: tensor[rows] for name, tensor in made.items()}
            logits = {"logits": wanted["logits"][rows]} if "logits" in wanted else {}
            yield "alone", Comparison.worst(c for _, c in compare_outputs(here, {**logits, **alone}, len(rows), act))


def _with_idle_others(case: Case, rows: Sequence[int]) -> Case:
    """The case with all but some rows idle, which stay at their places."""
    keep = torch.isin(torch.arange(case.rows), torch.tensor(rows))
    caches = {}
    for name, cache in case.caches.items():
        idle = {"slot": torch.where(keep, cache.slot, -1), "length": cache.length * keep, "seq": cache.seq * keep}
        caches[name] = type(cache)(**{**vars(cache), **{part: tensor.to(torch.int32) for part, tensor in idle.items()}})
    inputs = {name: tensor * keep.view(-1, *[1] * (tensor.dim() - 1)).to(tensor.dtype) for name, tensor in case.inputs.items()}
    return Case(inputs, caches, case.spans)
