"""Programs without their runner: EAGLE-3, DFlash and Medusa-1 against the interpreter and golden values; latent attention of
long contexts. What the proposer makes of the same artifacts is test_families'."""

from __future__ import annotations

import pytest
import torch

from circuitgraph.errors import CircuitgraphError
from circuitgraph.measure.cases import Span
from circuitgraph.measure.truth import LIMITS, check_draft, reference
from tests import program_cases as golden_cases
from tests.gpu.calls import allowed_tokens, artifact_folder, check_caches, same_caches, situation
from tests.gpu.direct import live_rows, open_direct, perturbed, with_caches, worst


def writes(opened, entry: str) -> bool:
    return any(node.op.startswith("append") for node in opened.entry(entry).circuit.nodes)


def case_of(opened, entry, rows, seed):
    """Rows see what is in the cache; the newest one only where the entry writes it."""
    case = situation(opened.entry(entry), entry, rows, seed)
    if case.caches and not writes(opened, entry):
        ((_, cache),) = case.caches.items()
        case = with_caches(case, length=(cache.length - 1).clamp(min=0))
    return case


def check(direct, case, entry, got) -> None:
    """(outputs, caches) are the interpreter's."""
    caches, live = case.copy_caches(), direct.circuit.act
    meant = live_rows(case, reference(direct.circuit, entry, case, direct.weights, caches))
    made = live_rows(case, got[0])
    limit = LIMITS[live]
    if case.caches and writes(direct, entry):
        check_caches(case, got[1], caches, limit)
    else:
        assert same_caches(got[1], case.caches)
    if entry.endswith("_masked"):  # scores and masks are of the head's own ids
        made, meant = ({key.removeprefix("masked_"): value for key, value in values.items()} for values in (made, meant))
        own = torch.arange(meant["logits"].shape[-1], device=direct.device)
        allowed = allowed_tokens(case.inputs["allowed"][: case.live], own)
        lowest = meant["logits"].amin(-1, keepdim=True)  # far from the best, and the spread stays what it is
        meant["logits"] = torch.where(allowed, meant["logits"], lowest)
    if "draft" in made:
        nodes = direct.entry(entry).circuit.nodes
        offsets = next((direct.weights[node.inputs[1]] for node in nodes if node.op == "target_ids"), None)
        check_draft(entry, live, made, meant, offsets=offsets)
        spread = meant["logits"].float().std()
        assert (made["logprob"] - meant["logprob"]).abs().max() <= 8 * limit * spread
    assert worst({name: tensor for name, tensor in made.items() if name != "logprob"}, meant) < 2 * limit


@pytest.mark.parametrize("seed", range(4))
def test_direct_program_computes_what_the_circuit_means(direct, seed):
    folder, entry, rows = direct
    opened = open_direct(folder)
    case = case_of(opened, entry, rows, seed)
    check(opened, case, entry, opened.call(entry, case))


def test_a_wrong_weight_is_seen(direct):
    """The control: with the rows of one weight in another order, what was right is not."""
    folder, entry, rows = direct
    opened = open_direct(folder)
    names = [weight.name for weight in opened.entry(entry).circuit.weights if len(weight.type.shape) == 2]
    case = case_of(opened, entry, rows, 1)
    wrong = [name for name in names if "embed" not in name][-1:]
    assert wrong or not names
    for name in wrong:
        with pytest.raises((AssertionError, CircuitgraphError)):
            check(opened, case, entry, opened.call(entry, case, perturbed(opened.weights, name)))


BLOCKS = [f"direct_dflash{kind}" for kind in ("", "_blocks", "_narrow", "_heads", "_window_mixed", "_window_blocks")]


@pytest.mark.parametrize("context", [63, 64, 129, 1000, 4000])
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_long_contexts(name, context):
    """Every part of a context has several tiles; sequences end apart."""
    opened = open_direct(artifact_folder(name))
    draft = opened.entry("draft")
    block = draft.circuit.block_size
    for rows in opened.manifest.widths("draft"):
        spans = [Span(max(1, context - 7 * i), block, i % 3) for i in range(rows // block)]
        case = situation(draft, "draft", rows, context % 4, spans=spans)
        check(opened, case, "draft", opened.call("draft", case))


def golden(name: str):
    opened = open_direct(artifact_folder(f"direct_fixture_{name}"))
    weights = {weight: tensor.cpu() for weight, tensor in opened.weights.items()}
    return opened, weights, (*opened.circuit.states, None)[0]


@pytest.mark.parametrize("case", ["context_and_block", "a_smaller_block", "three_sequences", "catching_up"])
def test_dflash_golden(case):
    getattr(golden_cases, f"check_{case}")(*golden(golden_cases.DFLASH))


def test_eagle3_golden():
    opened, weights, state = golden(golden_cases.EAGLE3)
    golden_cases.check_eagle3(opened, weights, state)
    with pytest.raises(AssertionError):
        golden_cases.check_eagle3(opened, perturbed(weights, "d2t"), state)


@pytest.mark.parametrize("case", golden_cases.MEDUSA_CASES)
def test_medusa_golden(case):
    opened, weights, _ = golden(golden_cases.MEDUSA)
    golden_cases.check_medusa(case, lambda entry, hidden: opened.run(entry, {"hidden": hidden.contiguous()}, weights, {}))
    wrong = perturbed(weights, "head_0.lm_head")
    with pytest.raises(AssertionError):
        golden_cases.check_medusa(case, lambda entry, hidden: opened.run(entry, {"hidden": hidden.contiguous()}, wrong, {}))


# -- latent attention --------------------------------------------------------------------------------------------

LATENT_LIMITS = {"f32": 2e-5, "f16": 2e-3, "bf16": 1e-2}
"""Queries and cache are the same on both sides; weights are rounded before they multiply, and the result once more."""


def latent_case(opened, rows: int, seed: int, spans):
    case = situation(opened.entry("attend"), "attend", rows, seed, spans=spans)
    return case, case.caches["kv"]


def latent_error(opened, case) -> float:
    meant = reference(opened.circuit, "attend", case, opened.weights, case.copy_caches())
    return worst(live_rows(case, opened.call("attend", case)[0]), live_rows(case, meant))


@pytest.mark.parametrize("context", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000, 4096, 32768, 131071])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_every_cache_row_counts(dtype, context):
    """All latents are zero but those of a few rows: the newest, the oldest, at edges of tiles and of parts, in between. Each
    is a share of the result that shows. Then all are random."""
    opened = open_direct(artifact_folder(f"direct_latent_{dtype}"))
    for rows in (1,) if context > 100_000 else (1, 2, 5):
        for seed in (1,) if context > 1000 else (0, 1, 2, 3):
            spans = [Span(max(1, context - 7 * i), 1, seed % 3) for i in range(rows)]
            case, cache = latent_case(opened, rows, seed, spans)
            case = with_caches(case, length=cache.length - 1)  # the newest row is not written here
            cache = case.caches["kv"]
            assert latent_error(opened, case) < LATENT_LIMITS[dtype]
            latents = torch.zeros_like(cache.v)
            generator = torch.Generator().manual_seed(context)
            for row, span in enumerate(spans):
                some = torch.randint(0, span.context, (4,), generator=generator).tolist()
                for place in {*some, 0, span.context - 1, 63, 64, span.context // 2 // 64 * 64} & set(range(span.context)):
                    block, offset = divmod(span.start + place, cache.block_size)
                    at = int(cache.table[row, block])
                    latents[:, at, :, offset] = torch.randn(latents.shape[4], generator=generator).to(latents)
            case = with_caches(case, v=latents)
            assert latent_error(opened, case) < LATENT_LIMITS[dtype]


def test_a_missing_cache_row_is_seen():
    """The control of the test above: of three marked rows the reference leaves one out."""
    opened = open_direct(artifact_folder("direct_latent_bf16"))
    case, cache = latent_case(opened, 1, 1, [Span(4096)])
    latents = torch.zeros_like(cache.v)
    for place in (0, 64, 4095):
        block, offset = divmod(place, cache.block_size)
        latents[:, int(cache.table[0, block]), :, offset] = torch.randn(latents.shape[4]).to(latents)
    case = with_caches(case, v=latents, length=cache.length - 1)
    assert latent_error(opened, case) < LATENT_LIMITS["bf16"]
    made, _ = opened.call("attend", case)
    case = with_caches(case, start=case.caches["kv"].start + 1)
    meant = reference(opened.circuit, "attend", case, opened.weights, case.copy_caches())
    assert worst(made, meant) > 10 * LATENT_LIMITS["bf16"]


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_latent_rows_that_see_nothing(dtype):
    """Start at the end, or behind it, or no rows at all: zeros; neighbours have what they had."""
    opened = open_direct(artifact_folder(f"direct_latent_{dtype}"))
    for more in (0, 1, 40):
        case, cache = latent_case(opened, 5, 2, [Span(100 + i) for i in range(5)])
        length = cache.length - 1
        start = cache.start.clone()
        start[1] = int(length[1]) + more
        length[3] = 0
        case = with_caches(case, length=length, start=start)
        made, _ = opened.call("attend", case)
        attended = made["attended"]
        assert torch.equal(attended[[1, 3]], torch.zeros_like(attended[[1, 3]]))
        assert latent_error(opened, case) < LATENT_LIMITS[dtype]
