"""The command line. One file per command; heavy imports happen inside the commands, so that `--help` answers at once."""

import gc


def main() -> None:
    """Entry point of `circuitgraph`. Exit status: 0 fine, 1 failed, 2 misused."""
    # Importing torch makes hundreds of thousands of objects that stay: looking through them again and again costs a tenth.
    gc.set_threshold(100_000)
    from .app import app

    app()
