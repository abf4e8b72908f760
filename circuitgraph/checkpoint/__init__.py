"""Checkpoints: config and tensor files, how a family names its tensors, and binding them to a program's weights.

`files` imports safetensors and torch only, so a serving box can use it. What needs the compiler's packages is
therefore imported when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .account import ReportRow, TensorRef
    from .binding import BoundProgram, bind, default_config, load_circuit
    from .config import ModelConfig, RawConfig, read_config
    from .family import Family, load_family, shipped_families
    from .files import TensorFiles, TensorInfo
    from .model import Model, open_checkpoint

_HOMES = {
    "account": ("ReportRow", "TensorRef"),
    "binding": ("BoundProgram", "bind", "default_config", "load_circuit"),
    "config": ("ModelConfig", "RawConfig", "read_config"),
    "family": ("Family", "load_family", "shipped_families"),
    "files": ("TensorFiles", "TensorInfo"),
    "model": ("Model", "open_checkpoint"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "BoundProgram",
    "Family",
    "Model",
    "ModelConfig",
    "RawConfig",
    "ReportRow",
    "TensorFiles",
    "TensorInfo",
    "TensorRef",
    "bind",
    "default_config",
    "load_circuit",
    "load_family",
    "open_checkpoint",
    "read_config",
    "shipped_families",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
