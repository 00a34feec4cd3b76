"""The commit of the code that runs."""

from __future__ import annotations

import subprocess
from pathlib import Path


def git_commit() -> str:
    """Commit of this checkout, with "+" if tracked files have changed since; "" outside of one."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        return done.stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        return commit + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return ""
