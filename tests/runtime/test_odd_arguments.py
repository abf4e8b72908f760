"""Every public function of `circuitgraph.runtime`, with one argument after the other being something that it is not.

A server's mistake is told as what it is, where it is, and changes nothing. What an odd value legitimately means is listed
with the call: those must go through.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import circuitgraph.runtime as runtime
from circuitgraph.artifact import Artifact, write_artifact
from circuitgraph.errors import CircuitgraphError, RuntimeUseError
from circuitgraph.ops import PagedKV
from circuitgraph.runtime import (
    BlockPool,
    CompiledRunner,
    MtpProposer,
    ReferenceRunner,
    accept_greedy,
    bind_weights,
    cut_drafts,
    load,
    open_library,
)
from tests.runtime.helpers import InterpretedLibrary, Script, drafter, manifest_of, proposer_of
from tests.runtime.test_proposer import prefilled, propose, snapshot, unchanged

ODD: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "2.5": lambda: 2.5,
    "True": lambda: True,
    "'x'": lambda: "x",
    "-1": lambda: -1,
    "2**70": lambda: 2**70,
    "nan": lambda: math.nan,
    "object": lambda: object(),
    "['x']": lambda: ["x"],
    "{}": dict,
    "bools": lambda: torch.tensor([True]),
    "floats": lambda: torch.zeros(3),
    "doubles": lambda: torch.zeros(1, 48, dtype=torch.float64),
}


@dataclass
class World:
    """A proposer with sequences in the states that calls need, and a compiled runner."""

    proposer: Any = field(default_factory=lambda: proposer_of(block_size=8))
    script: Script = field(default_factory=lambda: Script(0))

    def __post_init__(self):
        self.fresh, self.ready, self.drafted = (self.proposer.alloc_state() for _ in range(3))
        for state in (self.ready, self.drafted):
            self.proposer.prefill_drafter(self.script.tokens[:5], self.script.hiddens[:5], state)
        propose(self.proposer, self.script, 5, 2, self.drafted)
        self.settling = prefilled(self.proposer, self.script, 5)
        out = torch.zeros(1, 2, dtype=torch.int32)
        self.proposer.propose_batch(ints([1]), self.script.hiddens[4:5], [5], 2, [self.settling], out=out)
        taken = prefilled(self.proposer, self.script, 5)
        self.carried = self.proposer.take_drafter_kv(taken)
        self.proposer.free_state(taken)
        self.states = [self.fresh, self.ready, self.drafted, self.settling]

    def all(self):
        return snapshot(self.proposer, *self.states), dict(self.proposer.metrics.refusals), self.proposer.runner


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


Call = tuple[Callable[..., Any], dict[str, Any], dict[str, str]]
"""What to call, with which arguments, and which odd values of an argument mean something (names of ODD, by blanks)."""

STATE = {"state": ""}


def proposer_calls(w: World) -> dict[str, Call]:
    p, s = w.proposer, w.script
    hidden, rows = s.hiddens[4], s.hiddens[:4]
    one = {"last_tokens": [1], "target_hiddens": s.hiddens[4:5], "positions": [5], "num_drafts": 2, "states": [w.ready]}
    device = {**one, "last_tokens": ints([1]), "out": torch.zeros(1, 2, dtype=torch.int32)}
    return {
        "alloc_state": (p.alloc_state, {}, {}),
        "alloc_state_for": (p.alloc_state_for, {"budget_tokens": 9}, {"budget_tokens": "None 2**70"}),
        "free_state": (p.free_state, {"state": w.ready}, {}),
        "take_drafter_kv": (p.take_drafter_kv, {"state": w.ready}, {}),
        "install_drafter_kv": (
            p.install_drafter_kv, {"state": w.fresh, "carried": w.carried, "prefix": [1]},
            # Said by False, not by an error: a server may hold KV of a proposer that is gone. No token is in common with none.
            {"prefix": "None {}", "carried": " ".join(ODD)},
        ),
        "free_drafter_kv": (p.free_drafter_kv, {"carried": w.carried}, {}),
        "prefill_drafter": (
            p.prefill_drafter, {"prompt_tokens": s.tokens[:5], "hiddens": s.hiddens[:5], "state": w.fresh, "first_pos": 0}, {}
        ),
        "prefill_hidden_rows": (p.prefill_hidden_rows, {"max_seq_len": 9}, {"max_seq_len": "2**70"}),
        "catchup_drafter": (
            p.catchup_drafter,
            {"tokens": [1], "hiddens": s.hiddens[4:5], "row_base": 4, "pos_base": 5, "state": w.ready},
            {"row_base": "-1 2**70", "hiddens": "doubles"},
        ),
        "catchup_batch": (
            p.catchup_batch, {"tokens": [[1]], "hiddens": [s.hiddens[4:5]], "first_pos": [5], "states": [w.ready]}, {}
        ),
        "catchup_accepted": (
            p.catchup_accepted,
            {"tokens": ints([[1, 2]]), "hiddens": s.hiddens[None, 5:7], "states": [w.drafted], "accepted": ints([1]), "first": 1},
            {},
        ),
        "propose": (
            p.propose,
            {"last_token": 1, "target_hidden": hidden, "position": 5, "num_drafts": 2, "state": w.ready},
            {"last_token": "True bools", "num_drafts": "2**70"},
        ),
        "propose, options": (
            p.propose,
            {"last_token": 1, "target_hidden": hidden, "position": 5, "num_drafts": 2, "state": w.ready, "grammar": None,
             "stop_confidence": None, "stop_ids": (), "draft_embed_target": None},
            {"grammar": "None", "stop_confidence": "None", "stop_ids": "{}", "draft_embed_target": "None",
             "last_token": "True bools", "num_drafts": "2**70"},
        ),
        "propose, stack": (
            p.propose,
            {"last_token": 1, "target_hidden": None, "position": 5, "num_drafts": 2, "state": w.ready,
             "target_hidden_stack": rows[:1]},
            {"target_hidden": "None", "target_hidden_stack": "doubles", "last_token": "True bools", "num_drafts": "2**70"},
        ),
        "propose_batch": (
            p.propose_batch, {**one, "grammars": None, "stop_ids": (), "out_confidence": None, "accepted": None, "out": None},
            {"grammars": "None", "stop_ids": "{}", "out_confidence": "None ['x']", "accepted": "None", "out": "None",
             "target_hiddens": "doubles", "num_drafts": "2**70"},
        ),
        "propose_batch, device form": (
            p.propose_batch, {**device, "accepted": None},
            {"accepted": "None", "target_hiddens": "doubles", "out": "None"},
        ),
        "settle": (p.settle, {"states": [w.settling], "accepted": [1]}, {}),
        "read_deferred_draft_token": (p.read_deferred_draft_token, {}, {}),
        "propose_batch_max": (p.propose_batch_max, {}, {}),
        "after_verify": (p.after_verify, {"num_accepted": 1, "state": w.drafted}, {}),
        "drafter_rows": (p.drafter_rows, {"state": w.ready}, {}),
        "rows_behind": (p.rows_behind, {"state": w.ready, "position": 9}, {"position": "-1 2**70"}),
        "last_pair_key": (p.last_pair_key, {"state": w.ready}, {}),
        "last_confidence": (p.last_confidence, {"state": w.ready}, {}),
        "circuit_draft": (
            p.circuit_draft, {"config": {}, "levers": None, "reasons": None},
            {"config": "object {} bools floats doubles", "levers": "None {}", "reasons": "None ['x']"},
        ),
        "set_circuit_draft": (p.set_circuit_draft, {"runner": None}, {"runner": "None"}),
        "prefill_uses_shared_buffers": (p.prefill_uses_shared_buffers, {}, {}),
        "needs_comm": (p.needs_comm, {}, {}),
        "block_gamma": (p.block_gamma, {}, {}),
        "MtpProposer": (MtpProposer, {"runner": drafter(), "pool": BlockPool(drafter().circuit, blocks=4), "trim": "exact"}, {}),
    }  # fmt: skip


def pool_calls(w: World) -> dict[str, Call]:
    pool = BlockPool(drafter().circuit, blocks=6, block_size=4)
    lease, other, lent = pool.open(4), pool.open(), pool.open()
    pool.grow([(lease, 4), (lent, 8)])
    blocks = pool.lend(lent)
    sized = {"circuit": drafter().circuit, "block_size": 8, "device": "cpu"}
    return {
        "BlockPool": (BlockPool, {**sized, "blocks": 4}, {}),
        "BlockPool, bytes": (BlockPool, {**sized, "memory_bytes": 9999}, {}),
        "blocks_for": (pool.blocks_for, {"rows": 9}, {"rows": "2**70"}),
        "bytes_for": (pool.bytes_for, {"tokens": 9}, {"tokens": "2**70"}),
        "room": (pool.room, {"lease": lease}, {}),
        "open": (pool.open, {"promised_rows": 4}, {}),
        "grow": (pool.grow, {"needs": [(lease, 4)]}, {"needs": "{}"}),
        "shrink": (pool.shrink, {"lease": lease, "rows": 0}, {"rows": "2**70"}),
        "close": (pool.close, {"lease": other}, {}),
        "lend": (pool.lend, {"lease": lease}, {}),
        "adopt": (pool.adopt, {"lease": other, "blocks": blocks}, {}),
        "free": (pool.free, {"blocks": blocks}, {}),
    }


def runner_calls(runner: Any) -> dict[str, Call]:
    one = ints([1])
    state = runner.circuit.states[0]
    k, v = (torch.zeros(state.layers, 3, state.heads, 8, state.dim) for _ in "kv")
    cache = PagedKV(k, v, slot=one, seq=ints([0]), table=ints([[0, 1]]), start=ints([0]), length=ints([2]))
    rows = {"token": one, "hidden": torch.zeros(1, runner.hidden_size), "position": one, "kv": {state.name: cache}}
    allowed = torch.full((1, 5), -1, dtype=torch.int32)
    doubles = {"hidden": "doubles"}
    slots = ints([[1], [2]])
    calls: dict[str, Call] = {
        "serves": (runner.serves, {"n": 1}, {"n": "2**70"}),
        "draft": (runner.draft, rows, doubles),
        "draft_masked": (runner.draft_masked, {**rows, "allowed": allowed}, doubles),
        "context": (runner.context, rows, doubles),
        "logits": (runner.logits, rows, doubles),
        "chain": (runner.chain, {**rows, "steps": 2, "slots": slots, "allowed": None}, {**doubles, "allowed": "None"}),
        "check_storage": (runner.check_storage, {"storage": {state.name: (k, v)}}, {}),
        "model_digest": (runner.model_digest, {}, {}),
        "hidden_layer_ids": (runner.hidden_layer_ids, {"target_layers": 9}, {"target_layers": "2**70"}),
        "embed": (runner.embed, {"token": one, "out": torch.zeros(runner.embed_size)}, {}),
    }
    return calls


def reference_calls(w: World) -> dict[str, Call]:
    made: Call = (ReferenceRunner, {"circuit": drafter().circuit, "weights": drafter().weights}, {})
    return {**runner_calls(drafter()), "ReferenceRunner": made}


def compiled_calls(w: World) -> dict[str, Call]:
    manifest = manifest_of(drafter().circuit, masked=(1,))
    given = {"manifest": manifest, "functions": InterpretedLibrary(manifest).functions, "weights": drafter().weights}
    runner = CompiledRunner(**given)
    return {
        **runner_calls(runner),
        "rebind": (runner.rebind, {"weights": {}}, {"weights": "{}"}),
        "CompiledRunner": (CompiledRunner, {**given, "device": "cpu", "fallback": "cover"}, {}),
    }


def function_calls(artifact: Artifact) -> dict[str, Call]:
    weights = drafter().weights
    whole = {"weights": dict(weights), "model": None, "target_model": None, "max_position": 96, "seed": 0}
    # Everything that is given here is checked before the library is opened, which is none.
    loading = {"path": artifact.folder, **whole, "threads": None, "fallback": "cover", "device": None}
    return {
        "load": (load, loading, dict.fromkeys(("model", "target_model", "max_position", "threads", "device"), "None")),
        "open_library": (open_library, {"artifact": artifact, "threads": None}, {"threads": "None"}),
        "bind_weights": (
            bind_weights, {"artifact": artifact, **whole, "device": "cpu"},
            dict.fromkeys(("model", "target_model", "max_position"), "None"),
        ),
        "cut_drafts": (
            cut_drafts, {"confidences": [[-1.0]], "ratio": 0.5, "budget": None},
            {"budget": "None 2**70", "confidences": "{} doubles"},
        ),
        "accept_greedy": (accept_greedy, {"drafts": [1], "target": [1, 2]}, {"drafts": "bools"}),
    }  # fmt: skip


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    manifest = manifest_of(drafter().circuit)
    return write_artifact(tmp_path_factory.mktemp("odd") / "head", manifest, {"lib/kernels.so": b"no library"})


SETS: dict[str, Callable[[World], dict[str, Call]]] = {
    "proposer": proposer_calls,
    "pool": pool_calls,
    "reference": reference_calls,
    "compiled": compiled_calls,
}
CASES = [
    (name, call, argument) for name, made in SETS.items() for call, (_, given, _) in made(World()).items() for argument in given
]


@pytest.mark.shows("rule 1")
@pytest.mark.parametrize(("kind", "name", "argument"), CASES, ids=lambda item: item)
def test_an_odd_argument_is_refused_and_changes_nothing(kind, name, argument):
    wrong, world = [], None
    for odd, make in ODD.items():
        world = world or World()  # a refused call leaves it as it was
        function, given, means = SETS[kind](world)[name]
        before = world.all()
        try:
            function(**{**given, argument: make()})
        except CircuitgraphError as error:
            after = world.all()
            if odd in means.get(argument, "").split():
                wrong.append(f"{odd}: refused, {error}")
            elif not unchanged(before[0], after[0]) or before[1:] != after[1:]:
                wrong.append(f"{odd}: refused, and something changed")
        except Exception as error:
            wrong.append(f"{odd}: {error!r}")
            world = None
        else:
            world = None
            if odd not in means.get(argument, "").split():
                wrong.append(f"{odd}: accepted")
    assert not wrong, f"{name}, {argument}: " + "; ".join(wrong)


@pytest.mark.parametrize("name", ["load", "open_library", "bind_weights", "cut_drafts", "accept_greedy"])
def test_an_odd_argument_of_a_function_is_refused(artifact, name):
    wrong = []
    function, given, means = function_calls(artifact)[name]
    for argument in given:
        for odd, make in ODD.items():
            try:
                function(**{**given, argument: make()})
            except CircuitgraphError as error:
                # An artifact without a library does not load in the end, whatever its arguments are.
                if odd in means.get(argument, "").split() and "does not load" not in str(error):
                    wrong.append(f"{argument}={odd}: refused, {error}")
                if odd not in means.get(argument, "").split() and "does not load" in str(error):
                    wrong.append(f"{argument}={odd}: accepted")
            except Exception as error:
                wrong.append(f"{argument}={odd}: {error!r}")
            else:
                if odd not in means.get(argument, "").split():
                    wrong.append(f"{argument}={odd}: accepted")
    assert not wrong, "\n".join(wrong)


ELSEWHERE = {
    "DEFERRED", "TRIM", "CarriedKV", "DraftBinding", "DraftChain", "DraftProposer", "DraftRunner", "DraftStep", "Ledger",
    "Metrics", "MtpProposerState", "PoolExhausted", "ProposerState",
}  # fmt: skip
"""Names of values, of what the runtime makes itself, and of interfaces, whose implementations are here."""
INTERNAL = {
    "claim", "cover", "pick", "place_accepted", "place_chain", "release", "run_entry", "scores", "slots", "slots_of",
    "start_chain", "used_by",
}  # fmt: skip
"""Methods that a proposer or a bench calls and a server does not: what they are given has been looked at."""


def test_no_public_function_is_left_out(artifact):
    world = World()
    made = {name: {call.partition(",")[0] for call in calls(world)} for name, calls in SETS.items()}
    functions = set(function_calls(artifact))
    classes = {"proposer": MtpProposer, "pool": BlockPool, "reference": ReferenceRunner, "compiled": CompiledRunner}
    assert set(runtime.__all__) - ELSEWHERE == functions | {kind.__name__ for kind in classes.values()}
    for name, kind in classes.items():
        methods = {method for method, _ in inspect.getmembers(kind, callable) if not method.startswith("_")}
        assert methods - INTERNAL <= made[name], name


def test_every_argument_of_a_public_method_is_tried(artifact):
    world = World()
    calls = {**{(kind, name): call for kind, made in SETS.items() for name, call in made(world).items()}}
    calls |= {("function", name): call for name, call in function_calls(artifact).items()}
    tried: dict[Any, set[str]] = {}
    for (kind, name), (_, given, _) in calls.items():
        tried.setdefault((kind, name.partition(",")[0]), set()).update(given)
    for (kind, name), (function, _, _) in calls.items():
        # masked, recycled: flags, of which any truth will do.
        parameters = set(inspect.signature(function).parameters) - {"args", "kwargs", "masked", "recycled"}
        assert parameters <= tried[kind, name.partition(",")[0]], (kind, name)


# -- more than one argument can show -------------------------------------------------------------------------------


def test_stop_ids_may_be_gone_through_once_only():
    world = World()
    drafts = propose(world.proposer, world.script, 5, 4, world.ready)
    world.proposer.after_verify(0, world.ready)
    for kind in (iter, set, list, torch.tensor, lambda ids: (token for token in ids)):
        state = prefilled(world.proposer, world.script, 5)
        again = propose(world.proposer, world.script, 5, 4, state, stop_ids=kind([drafts[1]]), stop_confidence=0.0)
        assert again == drafts[: drafts.index(drafts[1]) + 1]
    batch = ([world.script.tokens[5]] * 2, [world.script.hiddens[4]] * 2, [5, 5], 4)
    states = [prefilled(world.proposer, world.script, 5) for _ in range(2)]
    both = world.proposer.propose_batch(*batch, states, stop_ids=iter([drafts[1]]))
    assert both == [drafts[: drafts.index(drafts[1]) + 1]] * 2, "the second row saw none of them"


def test_a_hidden_and_a_stack_of_them_are_one_too_many():
    world = World()
    before = world.all()
    with pytest.raises(RuntimeUseError, match="target_hidden: does not go with a stack of hiddens"):
        propose(world.proposer, world.script, 5, 2, world.ready, target_hidden_stack=world.script.hiddens[4:5])
    after = world.all()
    assert unchanged(before[0], after[0])


def test_reference_weights_are_all_there_and_fit():
    circuit, weights = drafter().circuit, dict(drafter().weights)
    for wrong, message in (
        ({}, "weights are missing"),
        ({**weights, "fc": None}, "fc: is something else; expected a tensor; got None"),
        ({**weights, "fc": weights["fc"][:-1]}, r"fc: does not fit; expected \[48, 96\]; got float32\[47, 96\]"),
        ({**weights, "fc": weights["fc"].to("meta")}, "weights lie on several devices"),
    ):
        with pytest.raises(RuntimeUseError, match=message):
            ReferenceRunner(circuit, wrong)
