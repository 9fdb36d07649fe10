"""Runs the program `peerlane`: `python -m peerlane doctor`, `allgather`, `explain` and its other commands."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def main() -> None:
    """Replaces this process by the program of the wheel, or by that in PATH."""
    packaged = Path(__file__).with_name("bin") / "peerlane"
    own = Path(sys.argv[0]).resolve()
    program = str(packaged) if packaged.exists() else shutil.which("peerlane")
    if program is None or Path(program).resolve() == own:
        how = "install a wheel, or run `cargo install --path cli` in a clone of Peerlane"
        sys.exit(f"error: this installation has no program peerlane; {how}")
    if packaged.exists() and not os.access(packaged, os.X_OK):
        packaged.chmod(0o755)
    os.execv(program, [program, *sys.argv[1:]])


if __name__ == "__main__":
    main()
