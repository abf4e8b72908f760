"""What a server imports. Needs torch and tvm_ffi only; docs/embedding.md shows the loop.

load -> DraftRunner -> MtpProposer over a BlockPool -> propose_batch, verify, after_verify, catchup_batch.

Names are imported when they are first used: the compiler takes single modules from here and should not wait for all.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .binding import bind_weights
    from .carried import CarriedKV
    from .compiled import CompiledRunner, open_library
    from .cut import cut_drafts
    from .draft_binding import DraftBinding
    from .loading import load
    from .metrics import Metrics
    from .mtp import MtpProposer
    from .pool import BlockPool, Ledger, PoolExhausted
    from .proposer import DraftProposer
    from .runner import DraftChain, DraftRunner, DraftStep, ReferenceRunner
    from .state import DEFERRED, MtpProposerState, ProposerState
    from .trim import TRIM
    from .verify import accept_greedy

_HOMES = {
    "binding": ("bind_weights",),
    "compiled": (
        "CompiledRunner",
        "open_library",
    ),
    "carried": ("CarriedKV",),
    "cut": ("cut_drafts",),
    "draft_binding": ("DraftBinding",),
    "loading": ("load",),
    "metrics": ("Metrics",),
    "mtp": ("MtpProposer",),
    "pool": (
        "BlockPool",
        "Ledger",
        "PoolExhausted",
    ),
    "proposer": ("DraftProposer",),
    "runner": (
        "DraftChain",
        "DraftRunner",
        "DraftStep",
        "ReferenceRunner",
    ),
    "state": (
        "DEFERRED",
        "MtpProposerState",
        "ProposerState",
    ),
    "trim": ("TRIM",),
    "verify": ("accept_greedy",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "DEFERRED",
    "TRIM",
    "BlockPool",
    "CarriedKV",
    "CompiledRunner",
    "DraftBinding",
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
    "cut_drafts",
    "load",
    "open_library",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
