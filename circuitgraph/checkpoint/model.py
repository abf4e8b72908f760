"""A model on disk: its config and, unless only a config.json was given, its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..places import check_model
from .config import RawConfig, read_raw
from .files import TensorFiles


@dataclass(frozen=True)
class Model:
    """`tensors` is None for a bare config: its weights are random. `target` is the model that a drafter borrows from."""

    path: Path
    config: RawConfig
    tensors: TensorFiles | None
    target: Model | None = None


def open_checkpoint(path: str | Path, target: str | Path | None = None, *, config_only: bool = False) -> Model:
    """Open a model folder, or a config.json that stands for one with random weights.

    config_only: of a folder, too, only the config is wanted.

    Raises:
        CheckpointError: no such path, an unreadable config, unreadable tensor files.
    """
    path = Path(path)
    check_model(path)
    tensors = TensorFiles.open(path) if path.is_dir() and not config_only else None
    return Model(path, read_raw(path), tensors, open_checkpoint(target) if target is not None else None)
