"""`python -m circuitgraph.cli`."""

from . import main

main()
