"""The forward as a circuit: what `circuit_draft` says, and running another forward in its place."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from circuitgraph.errors import RuntimeUseError
from circuitgraph.runtime import CompiledRunner, ReferenceRunner
from tests.runtime.helpers import POSITIONS, InterpretedLibrary, Script, drafter, manifest_of, oracle, proposer_of
from tests.runtime.test_proposer import accept, prefilled, propose

CONFIG = {"hidden_size": 48, "vocab_size": 131}


def compiled(**widths):
    manifest = manifest_of(drafter().circuit, **widths)
    library = InterpretedLibrary(manifest)
    return CompiledRunner(manifest, library.functions, drafter().weights), library


@pytest.mark.shows("method circuit_draft")
def test_the_binding_says_what_the_forward_is():
    runner, _ = compiled(masked=(1,))
    proposer, reasons = proposer_of(runner), ["old"]
    binding = proposer.circuit_draft(CONFIG, {"num_drafts": 3, "grammar": True, "trim": "valid", "tree": False}, reasons=reasons)
    assert binding is not None
    assert reasons == []
    assert (binding.program, binding.family, binding.circuit) == ("mtp_dense", "test", runner.circuit)
    assert binding.weights["fc"] == ("f32", (48, 96))
    assert set(binding.weights) == {weight.name for weight in runner.circuit.weights}
    assert (binding.kv, binding.bytes_per_row) == (runner.circuit.states, 2 * 2 * 16 * 4)
    assert (binding.widths, binding.context_rows) == ((1, 2, 4), (4, 8))
    assert (binding.context_limit, binding.block_size) == (POSITIONS, 8)
    assert (binding.hidden_source, binding.masked) == ("post_norm", True)
    assert any("sampling" in line for line in binding.not_modelled)
    assert proposer_of().circuit_draft(SimpleNamespace(text_config=SimpleNamespace(hidden_size=48))) is not None


@pytest.mark.parametrize(
    ("config", "levers", "reason"),
    [
        ({"hidden_size": 64, "vocab_size": 131}, {}, "hidden_size: the circuit has 48, the model 64"),
        ({"text_config": {"vocab_size": 500}}, {}, "vocab_size: the circuit has 131, the model 500"),
        ({"num_nextn_predict_layers": 3}, {}, "num_nextn_predict_layers: 3 modules"),
        (CONFIG, {"tensor_parallel": 4}, "tensor_parallel: the forward runs whole on one device"),
        (CONFIG, {"temperature": 0.7}, "temperature: drafts are greedy"),
        (CONFIG, {"tree": True}, "tree: drafts are chains"),
        (CONFIG, {"trim": "none"}, "trim: no policy 'none'"),
        (CONFIG, {"grammar": True}, "grammar: no program drafts under a mask"),
        (CONFIG, {"lora": "x"}, "lora: unknown to the circuit"),
    ],
)
def test_what_the_circuit_does_not_model_is_listed(config, levers, reason):
    reasons: list[str] = []
    assert proposer_of(compiled()[0]).circuit_draft(config, levers, reasons=reasons) is None
    assert len(reasons) == 1
    assert reasons[0].startswith(reason)


@pytest.mark.shows("method set_circuit_draft")
def test_another_forward_runs_from_the_next_call_on_and_the_own_one_again():
    own, library = compiled()
    proposer, script = proposer_of(own), Script(0)
    other = ReferenceRunner(own.circuit, own.weights)
    state, position = prefilled(proposer, script, 6), 6
    for runner in (other, None, other, None):
        library.calls.clear()
        proposer.set_circuit_draft(runner)
        assert propose(proposer, script, position, 3, state) == oracle(drafter(), script, position, 3)
        position = accept(proposer, script, state, position, 2)
        assert bool(library.calls) == (runner is None)
    assert proposer.metrics.paths == {"reference": 2, "n-row": 2}
    wrong = drafter(rope_position="hidden")
    with pytest.raises(RuntimeUseError, match="runner's facts: computes other rows"):
        proposer.set_circuit_draft(wrong)
    wide = replace(own.circuit, states=(replace(own.circuit.states[0], dim=32),))
    with pytest.raises(RuntimeUseError, match="storage does not fit"):
        proposer.set_circuit_draft(ReferenceRunner(wide, own.weights))
    assert proposer.runner is own


@pytest.mark.shows("rule 12")
def test_the_forward_is_never_changed_inside_a_propose():
    """Rule 12: calls on one proposer wait for each other."""
    own, _ = compiled()
    proposer, script, order = proposer_of(own), Script(0), []
    other = ReferenceRunner(own.circuit, own.weights)
    inside, state = threading.Event(), prefilled(proposer, script, 6)
    original = own.chain

    def slow(*args, **kwargs):
        inside.set()
        swap.join(0.2)
        order.append("drafted")
        return original(*args, **kwargs)

    def change():
        inside.wait()
        proposer.set_circuit_draft(other)
        order.append("changed")

    own.chain = slow
    swap = threading.Thread(target=change)
    swap.start()
    assert propose(proposer, script, 6, 3, state) == oracle(drafter(), script, 6, 3)
    swap.join()
    assert order == ["drafted", "changed"]
    assert proposer.runner is other


@pytest.mark.shows(
    "method prefill_uses_shared_buffers",
    "method needs_comm",
    "method block_gamma",
    "method propose_batch_max",
    "method prefill_hidden_rows",
)
def test_facts_for_a_scheduler():
    proposer = proposer_of()
    assert proposer.prefill_uses_shared_buffers() is False
    assert proposer.needs_comm() is False
    assert proposer.block_gamma() is None
    assert (proposer.prefill_hidden_rows(10), proposer.prefill_hidden_rows(10_000)) == (10, POSITIONS)
    assert proposer.propose_batch_max() == 64
    assert proposer_of(compiled(draft=(1, 8))[0]).propose_batch_max() == 8
