"""What public functions of the runtime ask of plain arguments, before anything changes."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch

from circuitgraph.errors import Fault, RuntimeUseError


def is_whole(value: Any) -> bool:
    """Whether it is an integer, Python's or an array library's; True and False are none."""
    # An ABC's isinstance costs as much as a propose's other checks of a row.
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def whole(
    value: Any, subject: str, where: str, *, least: int = 0, most: int | None = None, message: str = "is out of range"
) -> int:
    """The value as an int.

    Raises:
        RuntimeUseError: no integer, or one below `least` or above `most`.
    """
    if not is_whole(value) or value < least or (most is not None and value > most):
        expected = f"an int, {least} or more" if most is None else f"an int, {least}..{most}"
        raise RuntimeUseError(Fault(message, where=where, subject=subject, expected=expected, got=shown(value)))
    return int(value)


def of_kind(value: Any, kind: type | tuple[type, ...], subject: str, where: str, expected: str) -> None:
    """Raises RuntimeUseError for a value of another type."""
    if not isinstance(value, kind):
        raise RuntimeUseError(Fault("is something else", where=where, subject=subject, expected=expected, got=shown(value)))


def device_of(value: Any, where: str) -> torch.device:
    """A device, by its name or as it is.

    Raises:
        RuntimeUseError: torch knows no such device.
    """
    try:
        if isinstance(value, bool) or not isinstance(value, str | torch.device):
            raise TypeError
        return torch.device(value)
    except (TypeError, RuntimeError):
        expected = "a device of torch: cpu, cuda, cuda:1"
        raise RuntimeUseError(Fault("is no device", where=where, subject="device", expected=expected, got=shown(value))) from None


def shown(value: Any) -> str:
    """For a message: a tensor's type, shape and device, a short value itself, else what it is."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}] on {value.device}"
    if value is None or isinstance(value, bool | int | float | str):
        text = repr(value)
        return text if len(text) <= 40 else f"{text[:37]}..."
    return type(value).__name__
