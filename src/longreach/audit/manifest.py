"""The corpus's seal: version, a SHA-256 a file, and the list of every id ever published.

Ids only grow: one that leaves the corpus stays in ``retired`` and is never given to anything else.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, field_validator

NAME = "MANIFEST.json"
FORMAT = 1


class CorpusError(ValueError):
    """A corpus that cannot be used: a file changed, is missing or malformed, or an id was reused."""


class Manifest(BaseModel):
    """``MANIFEST.json``."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    format: int
    version: str
    ids: dict[str, str]  # id -> path of its file
    retired: dict[str, str]  # id -> version in which it left
    files: dict[str, str]  # path -> sha256

    @field_validator("version")
    @classmethod
    def _semantic(cls, version: str) -> str:
        if not re.fullmatch(r"\d+\.\d+\.\d+", version):
            raise ValueError(f"version {version!r} is not of the form MAJOR.MINOR.PATCH")
        return version


def digests(root: Path) -> dict[str, str]:
    """SHA-256 of every corpus file below ``root``, by relative path with forward slashes."""
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*.toml"))
    }


def read(root: Path) -> Manifest:
    """The manifest of the corpus at ``root``, after checking that every file is the one that was sealed."""
    path = root / NAME
    if not path.is_file():
        raise CorpusError(f"{root}: no {NAME}; seal the corpus with longreach.audit.seal(path, version)")
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except ValueError as error:
        raise CorpusError(f"{path}: {error}") from error
    if manifest.format != FORMAT:
        raise CorpusError(f"{path}: format {manifest.format}; this version reads format {FORMAT}")
    found = digests(root)
    if found != manifest.files:
        changed = sorted(name for name in found.keys() & manifest.files if found[name] != manifest.files[name])
        missing, added = sorted(manifest.files.keys() - found), sorted(found.keys() - manifest.files)
        raise CorpusError(f"{root}: not the sealed corpus: changed {changed}, missing {missing}, not in it {added}")
    return manifest


def seal(root: Path, version: str) -> Manifest:
    """Write the manifest of the corpus at ``root`` as ``version``.

    Raises:
        CorpusError: if an id occurs twice, a retired id comes back, or the version does not grow as it must: an id that
            leaves needs a new major version, one that comes a new minor one, any other change a new patch version.
    """
    ids: dict[str, str] = {}
    for path in sorted(root.rglob("*.toml")):
        name = path.relative_to(root).as_posix()
        identifier = tomllib.loads(path.read_text("utf-8")).get("id")
        if not isinstance(identifier, str):
            raise CorpusError(f"{name}: no id")
        if path.name != "task.toml":
            identifier = identifier if identifier.startswith("LR-0") else f"{path.parts[-3]}/{identifier}"
        if identifier in ids:
            raise CorpusError(f"{name}: id {identifier} is already that of {ids[identifier]}")
        ids[identifier] = name
    retired: dict[str, str] = {}
    files = digests(root)
    if (root / NAME).is_file():
        retired = _grown(Manifest.model_validate_json((root / NAME).read_bytes()), version, ids, files)
    manifest = Manifest(format=FORMAT, version=version, ids=ids, retired=retired, files=files)
    (root / NAME).write_text(json.dumps(manifest.model_dump(), indent=1, sort_keys=True) + "\n", "utf-8")
    return manifest


def _grown(old: Manifest, version: str, ids: dict[str, str], files: dict[str, str]) -> dict[str, str]:
    back = sorted(old.retired.keys() & ids)
    if back:
        raise CorpusError(f"ids {back} are retired and cannot be used again")
    gone, new = sorted(old.ids.keys() - ids), sorted(ids.keys() - old.ids)
    level = 0 if gone else 1 if new else 2 if files != old.files else 3
    before, after = (tuple(map(int, v.split("."))) for v in (old.version, version))
    if level < 3 and not after[: level + 1] > before[: level + 1]:
        name = ("major", "minor", "patch")[level]
        raise CorpusError(f"version {version}: after {old.version} this change needs a new {name} version")
    return {**old.retired, **{identifier: version for identifier in gone}}
