"""The command line. One file per command; heavy imports happen inside the commands, so that `--help` answers at once."""

import atexit
import gc
import os
import sys


def main() -> None:
    """Entry point of `circuitgraph`. Exit status: 0 fine, 1 failed, 2 misused."""
    # Importing torch makes hundreds of thousands of objects that stay: looking through them again and again costs a tenth.
    gc.set_threshold(100_000)
    from .app import app

    status: object = 0
    try:
        app()
    except SystemExit as stop:
        status = stop.code or 0
        if not isinstance(status, int):
            raise
    # Taking torch apart object by object takes half a second. What has to happen at exit (temporary folders go) still does.
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:  # `circuitgraph show ... | head`
        status = 1
    os._exit(status)  # type: ignore[arg-type]
