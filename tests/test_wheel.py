"""A wheel contains every package, and the marker that it is typed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile

from tests.mpirun import ROOT
from tests.speed import limit

PACKAGES = ("adaptive", "collectives", "monitors", "controllers", "launchers")


def test_a_wheel_has_all_files(tmp_path):
    """A folder without `__init__.py` runs from here, and would be missing."""
    source = tmp_path / "source"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    options = ["-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit(170))
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("adaptive_dataflow-*.whl")
    built = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    there = {path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*")}
    files = {name for name in there if (ROOT / name).is_file() and "__pycache__" not in name}
    assert built == files
    assert {f"{package}/py.typed" for package in PACKAGES} <= built
