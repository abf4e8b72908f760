"""What a server imports. Needs torch and tvm_ffi only; docs/embedding.md shows the loop.

load -> DraftRunner -> MtpProposer over a BlockPool -> propose_batch, verify, after_verify, catchup_batch.
"""

from .binding import bind_weights
from .compiled import CompiledRunner, open_library
from .loading import load
from .metrics import Metrics
from .mtp import MtpProposer
from .pool import BlockPool, Ledger, PoolExhausted
from .proposer import DraftProposer
from .runner import DraftChain, DraftRunner, DraftStep, ReferenceRunner
from .state import MtpProposerState, ProposerState
from .verify import accept_greedy

__all__ = [
    "BlockPool",
    "CompiledRunner",
    "DraftChain",
    "DraftProposer",
    "DraftRunner",
    "DraftStep",
    "Ledger",
    "Metrics",
    "MtpProposer",
    "MtpProposerState",
    "PoolExhausted",
    "ProposerState",
    "ReferenceRunner",
    "accept_greedy",
    "bind_weights",
    "load",
    "open_library",
]
