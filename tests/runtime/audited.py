"""A proposer that audits itself. Imports what a serving box has, and no more: GPU tests use it, too."""

from __future__ import annotations

import functools
from collections.abc import Callable

from circuitgraph.runtime import MtpProposer


class Audited(MtpProposer):
    """Checks the ledger after every call, raising or not."""

    def audit(self) -> None:
        ledger = self.pool.ledger
        assert ledger.balances, ledger
        assert ledger.promised == self.pool._promised
        assert ledger.held == self.pool.held
        blocks = [block for lease in self.pool._leases for block in lease.blocks]
        everywhere = blocks + self.pool._free + list(self.pool._loaned)
        assert sorted(everywhere) == list(range(self.pool.total)), "a block is in two places, or in none"


def _audited(method: Callable) -> Callable:
    @functools.wraps(method)
    def call(self, *args, **kwargs):
        try:
            return method(self, *args, **kwargs)
        finally:
            self.audit()

    return call


for _name in (
    "alloc_state", "alloc_state_for", "free_state", "prefill_drafter", "catchup_drafter", "catchup_batch",
    "propose", "propose_batch", "after_verify", "take_drafter_kv", "install_drafter_kv", "free_drafter_kv",
    "catchup_accepted", "settle", "set_circuit_draft",
):  # fmt: skip
    setattr(Audited, _name, _audited(getattr(MtpProposer, _name)))
