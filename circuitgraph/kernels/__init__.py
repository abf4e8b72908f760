"""Kernel templates: base.py says what one is, a folder per target kind holds its own."""

from importlib import import_module

from ..errors import BuildError, Fault


def register_kernels(kind: str) -> None:
    """Import the templates of a target kind, so that `base.KERNELS` has them.

    Raises:
        BuildError: TVM, which templates are written with, is not installed.
    """
    try:
        import_module(f".{kind}.templates", __name__)
    except ModuleNotFoundError as problem:
        if (problem.name or "").split(".")[0] != "tvm":
            raise
        raise BuildError(Fault("kernels need Apache TVM", hint="pip install 'circuitgraph[compiler]'")) from None
