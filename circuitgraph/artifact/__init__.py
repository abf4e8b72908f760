"""What `compile` leaves and a server loads: code, its manifest, and only those weights that compiling made."""

from .machine import built_for_gpu, check_device, machine_features
from .manifest import FORMAT, MANIFEST, Arg, Build, Function, Manifest, Model, Target, WeightSpec, config_digest
from .store import Artifact, check_output, pack_zip, read_artifact, write_artifact

__all__ = [
    "FORMAT",
    "MANIFEST",
    "Arg",
    "Artifact",
    "Build",
    "Function",
    "Manifest",
    "Model",
    "Target",
    "WeightSpec",
    "built_for_gpu",
    "check_device",
    "check_output",
    "config_digest",
    "machine_features",
    "pack_zip",
    "read_artifact",
    "write_artifact",
]
