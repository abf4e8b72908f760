"""What `compile` leaves and a server loads: code, its manifest, and only those weights that compiling made."""

from .manifest import FORMAT, MANIFEST, Arg, Function, Manifest, Model, Target, WeightSpec, config_digest
from .store import Artifact, check_output, machine_features, pack_zip, read_artifact, write_artifact

__all__ = [
    "FORMAT",
    "MANIFEST",
    "Arg",
    "Artifact",
    "Function",
    "Manifest",
    "Model",
    "Target",
    "WeightSpec",
    "check_output",
    "config_digest",
    "machine_features",
    "pack_zip",
    "read_artifact",
    "write_artifact",
]
