"""The compiler on one page.

load -> resolve -> check -> slice -> specialize -> fuse -> schedule -> place -> lower -> build -> pack

Every stage takes a valid form and leaves one; `Run` verifies, times and shows each to the observer. The same names
are what `--stop-after` and `show --stage` take.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from .circuit.check import check
from .circuit.ir import Circuit
from .circuit.narrow import slice_entry, specialize
from .circuit.text import format_circuit
from .errors import CircuitError, Fault, did_you_mean
from .places import check_dump
from .plan.fuse import fuse, verify_groups
from .plan.ir import Plan
from .plan.packed import unreadable
from .plan.place import place, verify_placement
from .plan.schedule import Rule, load_schedule, schedule
from .plan.text import CONTEXT_FOR_COST, format_groups, format_plan
from .target import Target, backend_of, parse_targets

STAGES = ("load", "resolve", "check", "slice", "specialize", "fuse", "schedule", "place", "lower", "build", "pack")
CIRCUIT_STAGES = ("resolve", "check", "slice", "specialize")
PLAN_STAGES = ("fuse", "schedule", "place")

DEFAULT_WIDTHS = (1, 2, 3, 4, 8)
DEFAULT_CONTEXT_ROWS = (4, 16, 64)
MAX_ROWS = 1024
"""Rows of one program at most: a program for more gains nothing over two calls."""

Observer = Callable[[str, str, Any, float], None]
"""Called after each stage with (stage, subject, result, seconds); subject is `draft_4`, or the program's name."""

Result = TypeVar("Result")


@dataclass
class Run:
    """Runs stages: each result is verified, timed, shown to the observer and, with `dump`, written to that folder."""

    observer: Observer | None = None
    dump: Path | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    def __call__(self, stage: str, subject: str, function: Callable[[], Result]) -> Result:
        started = time.perf_counter()
        result = function()
        verify_form(result)
        elapsed = time.perf_counter() - started
        self.seconds[stage] = self.seconds.get(stage, 0.0) + elapsed
        if self.dump is not None:
            dump_form(self.dump, stage, subject, result)
        if self.observer:
            self.observer(stage, subject, result, elapsed)
        return result


def verify_form(form: Any) -> None:
    """The verifier between stages.

    Raises:
        CircuitError: the form breaks its own rules.
    """
    if isinstance(form, Circuit):
        check(form)
    elif isinstance(form, Plan):
        verify_groups(form)
        if form.slots:
            verify_placement(form)


def form_text(form: Any) -> str | None:
    """How a form prints; None for those that are not text (a bound checkpoint, a library)."""
    if isinstance(form, Circuit):
        return format_circuit(form)
    if isinstance(form, Plan):
        return format_plan(form) if form.slots else format_groups(form)
    return form.script() if hasattr(form, "script") else None


def dump_form(folder: Path, stage: str, subject: str, form: Any) -> None:
    """Write `NN_stage_subject.txt`, numbered in the order of the pipeline."""
    text = form_text(form)
    if text is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{STAGES.index(stage):02d}_{stage}_{subject}.txt").write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class CompileResult:
    """What `compile` made: the plans of every architecture. `path` is None when `stop_after` ended it before `pack`."""

    path: Path | None
    circuit: Circuit
    plans: tuple[Plan, ...]
    seconds: Mapping[str, float]
    manifest: Any = None
    report: Any = None

    def step_bytes(self) -> tuple[int, int] | None:
        """(now, with plain weights) what one step of the narrowest draft program reads and writes; None without plans."""
        plans = [plan for plan in self.plans if plan.entry == "draft" and plan.choices]
        if not plans:
            return None
        plan = min(plans, key=lambda plan: plan.rows)
        plain = replace(plan, circuit=plan.circuit.with_storage({}))
        now, before = (sum(form.cost(group, CONTEXT_FOR_COST).bytes for group in form.groups) for form in (plan, plain))
        return now, before


def compile(
    program: str | Path,
    *,
    model: str | Path,
    out: str | Path,
    target: str = "cpu",
    widths: Sequence[int] = DEFAULT_WIDTHS,
    context_rows: Sequence[int] = DEFAULT_CONTEXT_ROWS,
    entries: Sequence[str] | None = None,
    also: Sequence[str] = (),
    family: str | None = None,
    target_model: str | Path | None = None,
    switches: Mapping[str, Any] | None = None,
    act: str | None = None,
    kv: str | None = None,
    wt: str | None = None,
    schedule_file: str | Path | None = None,
    quantize: Mapping[str, str] | None = None,
    dequantise: bool = False,
    draft_vocab: int | str | Path | Sequence[int] | None = None,
    overwrite: bool = False,
    stop_after: str | None = None,
    observer: Observer | None = None,
    dump: str | Path | None = None,
) -> CompileResult:
    """Compile a drafter program for a checkpoint into an artifact.

    Args:
        program: a shipped program's name, a YAML path, or "auto" to choose by the checkpoint's config.
        model: the drafter's checkpoint folder, or a config.json (then the weights are random).
        out: the artifact folder to make; it must not exist unless `overwrite`.
        target: `cpu`, `cpu:portable`, `cpu:<mcpu>`, or `cuda:` and GPU architectures: `cuda:sm_90a`, `cuda:sm_80,sm_90a`.
        widths: numbers of sequences to compile for; 1 is always added. A block drafter's programs have a block for each.
        context_rows: chunk sizes for prefill and catch-up. Neither numbers exceed MAX_ROWS.
        entries: which entries; by default all that are not `on_request`, and of those the ones named in `also`.
        target_model: checkpoint folder of the target, where embed_tokens and lm_head are borrowed from.
        family: a family's name or YAML path; recognised from the config when left out.
        switches: overrides of the family's switches.
        act, kv: dtypes of activations and cache: f32, bf16 or f16. Left out they are f32 on CPUs; on GPUs activations are as
            most of the checkpoint's weights, and the cache as activations.
        wt: dtype to convert weights to; left out, each keeps its own (random ones are bf16).
        schedule_file: schedule rules to use instead of the target's shipped ones.
        quantize: circuit weights, by name or pattern (`layer.*`), to the format that their copy in the artifact has:
            fp8 (e4m3, a scale a row), fp8-block (a scale for 128x128), int8 (a scale a row), nvfp4 or mxfp4. A name that
            kernels cannot read in that format is refused; of what a pattern fits, it stays as it is.
        dequantise: weights that the checkpoint has quantised become floats when they are loaded, whatever kernels can read.
        draft_vocab: the head scores the first so many tokens alone, or the listed ones (ids, or a file of them; see
            `checkpoint.vocabulary`). Drafts and masks stay in target ids.
        stop_after: a stage of `STAGES`.
        observer: called after every stage; see `Observer`.
        dump: a folder that gets the text of every stage's result, `05_fuse_draft_4.txt` and so on.

    The manifest records the absolute paths of `model` and `target_model`, so that `verify`, `bench` and `generate` find
    the weights again on this machine; elsewhere they are told the folders. Nothing else depends on the paths.

    Raises:
        CircuitgraphError: of the stage that failed; nothing is written then.
    """
    from .artifact.store import check_output

    if stop_after is not None and stop_after not in STAGES:
        raise CircuitError(Fault(f"no stage '{stop_after}'", hint=did_you_mean(stop_after, STAGES)))
    if stop_after in (None, "pack"):
        check_output(out, overwrite=overwrite)
    check_dump(dump)
    targets = parse_targets(target)
    act, kv = own_types(targets[0].kind, act, kv)
    run = Run(observer, Path(dump) if dump else None)
    bound = bind_program(run, program, model, family, target_model, switches, act, kv, wt, not dequantise)
    if draft_vocab is not None or quantize:
        bound = _made(bound, quantize or {}, draft_vocab)
        run("check", bound.circuit.name, lambda: bound.circuit)
    name = bound.circuit.name
    if stop_after in ("load", "resolve", "check"):
        return CompileResult(None, bound.circuit, (), run.seconds, report=bound.report)
    pieces = work_list(bound.circuit, entries, widths, context_rows, also)
    rules = load_schedule(targets[0].kind, Path(schedule_file) if schedule_file else None)
    bound = _readable(bound, pieces, targets, rules, set(quantize or ()))
    # Stages of several architectures have the same names: what they leave is dumped in folders apart.
    apart = {each: Run(observer, run.dump / each.arch if run.dump else None, run.seconds) for each in targets}
    runs = apart if len(targets) > 1 else dict.fromkeys(targets, run)
    forms = {
        each: [plan_piece(runs[each], bound.circuit, entry, rows, each.of_plans, rules, stop_after) for entry, rows in pieces]
        for each in targets
    }
    plans = tuple(form for made in forms.values() for form in made if isinstance(form, Plan))
    if stop_after in ("slice", "specialize", "fuse", "schedule", "place"):
        return CompileResult(None, bound.circuit, plans, run.seconds, report=bound.report)
    with tempfile.TemporaryDirectory() as folder:
        codes = [_build(runs[each], name, each, forms[each], Path(folder, each.arch), stop_after) for each in targets]
        if stop_after not in (None, "pack"):
            return CompileResult(None, bound.circuit, plans, run.seconds, report=bound.report)
        from .artifact.pack import pack

        # The folders are only where `verify` and `generate` look when they are not told: the config's digest decides.
        options = {
            "target": target,
            "widths": sorted({1, *widths}),
            "context_rows": sorted(set(context_rows)),
            "model": str(Path(model).resolve()),
            "target_model": str(bound.model.target.path.resolve()) if bound.model.target is not None else None,
        }
        artifact = run("pack", name, lambda: pack(Path(out), bound, codes, options, overwrite))
    return CompileResult(artifact.folder, bound.circuit, plans, run.seconds, artifact.manifest, bound.report)


def _build(run: Run, name: str, target: Target, plans: Sequence[Any], folder: Path, stop_after: str | None) -> Any:
    """Stages `lower` and `build` for one processor: an `artifact.pack.Code`, None when `stop_after` ends before."""
    from .artifact.pack import Code

    backend = backend_of(target)
    module = run("lower", name, lambda: backend.lower(list(plans)))
    if stop_after == "lower":
        return None
    folder.mkdir(exist_ok=True)
    built = run("build", name, lambda: backend.build(module, folder))
    scripts = {plan.symbol: backend.script(module, plan) for plan in plans}
    return Code(backend.description(), plans, scripts, built)


def _made(bound: Any, quantize: Mapping[str, str], draft_vocab: int | str | Path | Sequence[int] | None) -> Any:
    """The bound program with the vocabulary and the formats that the caller wants."""
    from .checkpoint.made import chosen, quantising, restricting
    from .checkpoint.vocabulary import draft_vocabulary

    if draft_vocab is not None:
        bound = restricting(bound, draft_vocabulary(draft_vocab, bound.config.values["vocab_size"]))
    return quantising(bound, chosen(bound, quantize))


def _readable(
    bound: Any, pieces: Sequence[tuple[str, int]], targets: Sequence[Target], rules: tuple[Rule, ...], required: set[str]
) -> Any:
    """The bound program with those weights alone quantised that the kernels of every target read as they are."""
    from .checkpoint.made import keeping_plain

    for target in targets:
        unread = unreadable(bound.circuit, pieces, target.of_plans, rules, required) if bound.circuit.storage else {}
        if unread:
            bound = keeping_plain(bound.dequantising(unread), [name for name in unread if name in bound.made])
    return bound


def own_types(kind: str, act: str | None, kv: str | None) -> tuple[str | None, str | None]:
    """(act, kv) as `bind` takes them, with what a target is best at in place of None: CPUs compute in f32, and activations are
    little; fast kernels of GPUs multiply what the weights are."""
    return (act or "f32", kv or "f32") if kind == "cpu" else (act, kv)


def bind_program(run: Run, program, model, family, target_model, switches, act, kv, wt, keep_packed: bool) -> Any:
    """Stages `load` to `check`: the program bound to a checkpoint, a `checkpoint.BoundProgram`."""
    from .checkpoint import bind

    bound = run(
        "load",
        str(program),
        lambda: bind(
            program,
            model=model,
            target_model=target_model,
            family=family,
            switches=dict(switches or {}),
            act=act,
            kv=kv,
            wt=wt,
            keep_packed=keep_packed,
        ),
    )
    run("resolve", bound.circuit.name, lambda: bound.circuit)
    run("check", bound.circuit.name, lambda: bound.circuit)
    return bound


def work_list(
    circuit: Circuit,
    entries: Sequence[str] | None,
    widths: Sequence[int],
    context_rows: Sequence[int],
    also: Sequence[str] = (),
) -> list[tuple[str, int]]:
    """(entry, rows) of every program to compile, single-row programs of sequence entries included.

    entries, also: as of `compile`.

    Raises:
        CircuitError: no entry or one that does not exist, a number of rows that is none from 1 to MAX_ROWS, or no
            `context_rows` for a context entry.
    """
    known = {entry.name: entry for entry in circuit.entries}
    if isinstance(entries, str):
        raise CircuitError(Fault("entries is a list of names", where=circuit.name, got=repr(entries)))
    usual = [entry.name for entry in circuit.entries if not entry.on_request] if entries is None else entries
    wanted = list(dict.fromkeys((*usual, *also)))
    faults = [
        Fault(f"no entry '{name}'", where=circuit.name, hint=did_you_mean(str(name), known))
        for name in wanted
        if name not in known
    ]
    if not wanted:
        faults.append(Fault("there is no entry to compile", where=circuit.name, hint=f"Known: {', '.join(known)}."))
    for option, given in (("widths", widths), ("context_rows", context_rows)):
        faults += _faulty_rows(circuit, option, given)
    size = circuit.block_size if not faults and any(known[name].rows == "block" for name in wanted) else 1
    if size > MAX_ROWS:
        hint = "Is the block's size in the model's config right?"
        faults.append(Fault(f"a program has at most {MAX_ROWS} rows", circuit.name, "block", got=f"{size} rows", hint=hint))
    elif size > 1 and size * max(widths, default=1) > MAX_ROWS:
        expected = f"at most {MAX_ROWS // size} sequences, whose blocks have {size} rows each"
        faults.append(Fault(f"a program has at most {MAX_ROWS} rows", circuit.name, "widths", expected, str(max(widths))))
    if not faults and not context_rows:
        faults += [
            Fault(
                "needs context_rows",
                where=circuit.name,
                subject=name,
                hint="Give the chunk sizes of the programs that read prompts.",
            )
            for name in wanted
            if known[name].rows == "context"
        ]
    if faults:
        raise CircuitError(faults)
    pieces = []
    for name in wanted:
        sizes = set(context_rows) if known[name].rows == "context" else {1, *widths}
        if known[name].rows == "block":
            sizes = {rows * circuit.block_size for rows in sizes}
        pieces += [(name, rows) for rows in sorted(sizes)]
    return pieces


def _faulty_rows(circuit: Circuit, option: str, given: object) -> list[Fault]:
    if not isinstance(given, Collection) or isinstance(given, str | bytes):
        return [Fault(f"{option} is a list of whole numbers", where=circuit.name, got=repr(given))]
    faults = []
    for rows in given:
        if isinstance(rows, bool) or not isinstance(rows, int):
            faults.append(Fault(f"{option} are whole numbers", where=circuit.name, got=repr(rows)))
        elif not 1 <= rows <= MAX_ROWS:
            faults.append(Fault(f"{option} are positive and at most {MAX_ROWS}", where=circuit.name, got=str(rows)))
    return faults


def plan_piece(
    run: Run, circuit: Circuit, entry: str, rows: int, target: str, rules: tuple[Rule, ...], stop_after: str | None = None
) -> Circuit | Plan:
    """Stages `slice` to `place` for one entry and number of rows: the form that the last of them left.

    target: `Target.of_plans`.
    """
    stages: tuple[tuple[str, Callable[[Any], Any]], ...] = (
        ("slice", lambda form: slice_entry(form, entry)),
        ("specialize", lambda form: specialize(form, rows)),
        ("fuse", lambda form: fuse(form, entry, rows, target)),
        ("schedule", lambda form: schedule(form, rules)),
        ("place", place),
    )
    form: Circuit | Plan = circuit
    for stage, step in stages:
        form = run(stage, f"{entry}_{rows}", partial(step, form))
        if stage == stop_after:
            break
    return form
