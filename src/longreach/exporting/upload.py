"""Upload an export to the Hub with `huggingface_hub`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import ExportError


def upload(
    path: Path, repository: str, *, private: bool, dry_run: bool, say: Callable[[str], None], api: Any = None
) -> str | None:
    """Create the repository if need be and upload a folder or file. Returns the commit's address; None for a dry run.

    Raises:
        ExportError: the Hub refuses (no token, no right, no network). The export itself stays where it is.
    """
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    if dry_run:
        say(f"would upload to {repository} ({'private' if private else 'public'} if new):")
        for file in files:
            name = file.name if path.is_file() else str(file.relative_to(path))
            say(f"  {name}  {file.stat().st_size / 1e6:,.1f} MB")
        return None
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    api = api or HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        if path.is_file():
            info = api.upload_file(path_or_fileobj=str(path), path_in_repo=path.name, repo_id=repository)
        else:
            info = api.upload_folder(folder_path=str(path), repo_id=repository, commit_message="Longreach export")
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ExportError(f"upload={repository!r}: {error}. The export itself is in {str(path)!r}.") from error
    return str(info.commit_url if hasattr(info, "commit_url") else info)
