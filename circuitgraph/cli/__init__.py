"""The command line. One file per command; heavy imports happen inside the commands, so that `--help` answers at once."""


def main() -> None:
    """Entry point of `circuitgraph`. Exit status: 0 fine, 1 failed, 2 misused."""
    from .app import app

    app()
