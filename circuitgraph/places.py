"""Paths that a user names, looked at before anything heavy is imported: a wrong one is told at once.

Nothing here is opened; who opens it says what is wrong inside.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from .errors import ArtifactError, CheckpointError, CircuitgraphError, Fault, ProgramError, ScheduleError, did_you_mean

PROGRAMS = Path(str(resources.files("circuitgraph.programs")))
MANIFEST = "manifest.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
"""Files that transformers makes a tokenizer of: one of them has to be there."""


def check_artifact(path: str | Path) -> None:
    """Raises ArtifactError for what is neither an artifact's folder nor a file."""
    path = Path(path)
    if not path.is_file() and not (path / MANIFEST).is_file():
        problem = f"has no {MANIFEST}" if path.is_dir() else "does not exist"
        hint = "Give the folder that `circuitgraph compile -o` wrote, or its zip."
        raise ArtifactError(Fault(problem, where=str(path), hint=hint))


def check_model(path: str | Path | None) -> None:
    """Raises CheckpointError for a drafter's folder, or config.json, that is not there; None is left out."""
    if path is not None and not Path(path).exists():
        hint = f"Give a model folder, or the path of a config.json.{_no_hub(path)}"
        raise CheckpointError(Fault("the path does not exist", where=str(path), hint=hint))


def check_target(path: str | Path | None) -> None:
    """Raises CheckpointError for a target's folder that is not there; None is left out."""
    if path is not None and not Path(path).exists():
        hint = f"Give the target model's folder.{_no_hub(path)}"
        raise CheckpointError(Fault("the path does not exist", where=str(path), hint=hint))


def _no_hub(path: str | Path) -> str:
    """What to add to a hint where a path that does not exist looks like Hugging Face's name of a model."""
    owner, *rest = Path(path).parts
    looks = len(rest) == 1 and Path(path).suffix != ".json" and owner not in ("/", "~") and not Path(owner).exists()
    return f" A model of the Hugging Face hub has to be downloaded first: `hf download {path}`." if looks else ""


def blocked(path: str | Path) -> Path | None:
    """The file in whose place `path`, a folder to be made, would need a folder; None where there is none."""
    path = Path(path).absolute()
    there = next((place for place in (path, *path.parents) if place.exists()), None)
    return None if there is None or there.is_dir() else there


def check_dump(folder: str | Path | None) -> None:
    """Raises CircuitgraphError for a folder to dump to that cannot be made; None is left out."""
    file = blocked(folder) if folder is not None else None
    if file is not None:
        hint = "Give a folder, which is made if it is not there."
        raise CircuitgraphError(Fault("cannot be written to", where=str(folder), got=f"'{file.name}' is a file", hint=hint))


def check_tokenizer(folder: str | Path) -> None:
    """Raises CheckpointError for a folder that no tokenizer can be made of. A GGUF file has its own."""
    folder = Path(folder)
    if folder.is_file() or any(folder.glob("*.gguf")) or any((folder / name).is_file() for name in TOKENIZERS):
        return
    expected, hint = f"one of {', '.join(TOKENIZERS)}", "Copy the tokenizer's files beside the model's."
    raise CheckpointError(Fault("has no tokenizer, which text needs", where=str(folder), expected=expected, hint=hint))


def check_schedule(path: str | Path | None) -> None:
    """Raises ScheduleError for a schedule file that is not there; None is left out."""
    if path is not None and not Path(path).is_file():
        problem = "is no file" if Path(path).exists() else "the file does not exist"
        raise ScheduleError(Fault(problem, where=str(path), hint="Give the path of a schedule's .yaml file."))


def shipped_programs() -> dict[str, Path]:
    """Name to file of every program in the distribution."""
    return {path.stem: path for path in sorted(PROGRAMS.glob("*.yaml"))}


def find_program(name_or_path: str | Path) -> Path:
    """A shipped program's name, or a path to a YAML file.

    Raises:
        ProgramError: neither.
    """
    shipped = shipped_programs()
    if str(name_or_path) in shipped:
        return shipped[str(name_or_path)]
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml") and path.is_file():
        return path
    hint = f"{did_you_mean(str(name_or_path), shipped)} Or give the path of a .yaml file."
    raise ProgramError(Fault(f"no program '{name_or_path}'", hint=hint))


def is_artifact(path: str | Path) -> bool:
    """Whether PROGRAM_OR_ARTIFACT is the latter."""
    path = Path(path)
    return (path / MANIFEST).is_file() or (path.is_file() and path.suffix in (".zip", ".cg"))
