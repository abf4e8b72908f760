"""Artifacts on disk: a folder, or one zip file. Written whole or not at all; nothing is loaded before it is verified."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..errors import ArtifactError, Fault
from ..places import blocked, check_artifact
from .machine import built_for_gpu, check_target
from .manifest import MANIFEST, Manifest

Content = bytes | Path | Callable[[Path], None]
"""Of a file to write: its bytes, a file to copy, or what writes it to a path and raises OSError."""


@dataclass(frozen=True)
class Artifact:
    """A verified artifact. One read from a zip lies in a temporary folder that lives as long as this object."""

    folder: Path
    manifest: Manifest
    origin: Path
    _temporary: tempfile.TemporaryDirectory | None = field(default=None, repr=False, compare=False)

    @property
    def library(self) -> Path:
        return self.folder / self.manifest.library


def write_artifact(folder: str | Path, manifest: Manifest, files: Mapping[str, Content], *, overwrite: bool = False) -> Artifact:
    """Write `files` (by relative name) and the manifest with their digests.

    Everything is made in a temporary folder beside `folder` and renamed into place at the end.

    Raises:
        ArtifactError: `folder` exists (with `overwrite`: and is no artifact), or the disk refused. Nothing is left then.
    """
    folder = Path(folder)
    check_output(folder, overwrite=overwrite)
    made: Path | None = None
    parents = [parent for parent in folder.parents if not parent.exists()]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
        digests = {}
        for name, content in sorted(files.items()):
            path = made / name
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, content)
            digests[name] = _digest(path)
        manifest = replace(manifest, files=digests)
        _write(made / MANIFEST, manifest.to_text().encode())
        made.chmod(0o755)  # mkdtemp's folders are private
        _move_into_place(made, folder)
    except OSError as error:
        hint = "Free some space or choose another place; nothing was left there."
        raise ArtifactError(Fault(f"could not be written: {error}", where=str(folder), hint=hint)) from error
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        with contextlib.suppress(OSError):  # they are not empty when all went well
            for parent in parents:
                parent.rmdir()
    return Artifact(folder, manifest, folder)


def check_output(folder: str | Path, *, overwrite: bool = False) -> None:
    """Refuse an output folder early, before the long work of compiling.

    Raises:
        ArtifactError: it exists and may not be replaced.
    """
    folder = Path(folder)
    if not (folder.exists() or folder.is_symlink()):
        file = blocked(folder)
        if file is not None:
            hint = "Choose another folder."
            raise ArtifactError(Fault("cannot be made", where=str(folder), got=f"'{file.name}' is a file", hint=hint))
        return
    if not overwrite:
        raise ArtifactError(Fault("exists already", where=str(folder), hint="Choose another folder, or overwrite it."))
    hint = "Only an artifact is ever replaced: choose another folder."
    if folder.is_symlink() or not (folder / MANIFEST).is_file():
        raise ArtifactError(Fault(f"exists and is not a folder with a {MANIFEST}", where=str(folder), hint=hint))
    try:
        listed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]  # of any format version
        foreign = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()} - {MANIFEST, *listed}
    except (OSError, ValueError, KeyError, TypeError):
        raise ArtifactError(Fault(f"its {MANIFEST} is not an artifact's", where=str(folder), hint=hint)) from None
    if foreign:
        names = ", ".join(sorted(foreign)[:5])
        raise ArtifactError(Fault("has files that are not the artifact's", where=str(folder), got=names, hint=hint))


def read_artifact(path: str | Path, *, to_run: bool = True) -> Artifact:
    """Read and verify an artifact folder or zip: format, digest of every file and, `to_run`, this machine's fitness.

    Raises:
        ArtifactError: the first thing that does not hold.
    """
    path = Path(path)
    check_artifact(path)
    if path.is_file():
        return _read_zip(path, to_run)
    return _verified(Artifact(path, _manifest((path / MANIFEST).read_bytes(), path / MANIFEST), path), to_run)


def pack_zip(folder: str | Path, file: str | Path) -> None:
    """The artifact as one file; equal artifacts give equal bytes.

    Raises:
        ArtifactError: `folder` does not verify, `file` exists, or the disk refused. Nothing is left then.
    """
    artifact, file = read_artifact(folder, to_run=False), Path(file)
    if file.exists():
        raise ArtifactError(Fault("exists already", where=str(file), hint="Choose another file."))
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in (MANIFEST, *sorted(artifact.manifest.files)):
                entry = zipfile.ZipInfo(name)  # dated 1980, whenever it was packed
                entry.compress_type = zipfile.ZIP_DEFLATED
                entry.external_attr = 0o644 << 16
                with archive.open(entry, "w", force_zip64=True) as sink, (artifact.folder / name).open("rb") as source:
                    shutil.copyfileobj(source, sink)
        _flush(partial)
        partial.rename(file)
    except OSError as error:
        raise ArtifactError(Fault(f"could not be written: {error}", where=str(file))) from error
    finally:
        partial.unlink(missing_ok=True)


def _read_zip(path: Path, to_run: bool) -> Artifact:
    hint = "The file is damaged or no artifact: pack or copy it again."
    temporary = tempfile.TemporaryDirectory(prefix="circuitgraph-")
    folder = Path(temporary.name)
    try:
        with zipfile.ZipFile(path) as archive:
            manifest = _manifest(archive.read(MANIFEST), path / MANIFEST)
            for name in set(manifest.files) & set(archive.namelist()):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                with archive.open(name) as source, (folder / name).open("wb") as sink:
                    shutil.copyfileobj(source, sink)
    except ArtifactError:
        raise
    except OSError as error:
        raise ArtifactError(Fault(f"could not be unpacked: {error}", where=str(path))) from error
    except Exception as error:  # zipfile lets through what its decompressors raise, and more
        raise ArtifactError(Fault(f"is not a readable artifact zip: {error}", where=str(path), hint=hint)) from error
    return _verified(Artifact(folder, manifest, path, temporary), to_run)


def _manifest(content: bytes, file: Path) -> Manifest:
    return Manifest.from_text(content.decode("utf-8", errors="replace"), str(file))


def _verified(artifact: Artifact, to_run: bool) -> Artifact:
    where = str(artifact.origin)
    if to_run:
        check_target(artifact.manifest.target, where)
        if artifact.manifest.others:
            artifact = replace(artifact, manifest=built_for_gpu(artifact.manifest))
    for name, digest in artifact.manifest.files.items():
        path = artifact.folder / name
        if not path.is_file():
            raise ArtifactError(Fault("is missing", where=where, subject=name, hint="Copy the artifact whole, or compile again."))
        found = _digest(path)
        if found != digest:
            hint = "The file is corrupted or was edited: copy the artifact again, or compile again."
            raise ArtifactError(Fault("has another digest", where=where, subject=name, expected=digest, got=found, hint=hint))
    return artifact


def _write(path: Path, content: Content) -> None:
    if isinstance(content, Path):
        shutil.copyfile(content, path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)
    _flush(path)


def _flush(path: Path) -> None:
    """Have the disk report a full device now, and keep a crash after the rename from leaving empty files."""
    with path.open("rb") as handle:
        os.fsync(handle.fileno())


def _move_into_place(made: Path, folder: Path) -> None:
    if not folder.exists():
        made.rename(folder)
        return
    old = made.with_suffix(".old")
    folder.rename(old)
    try:
        made.rename(folder)
    except BaseException:
        old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _digest(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
