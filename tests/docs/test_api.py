"""Every public name has a place in the pages of the reference, and no other name has."""

from __future__ import annotations

import importlib
import inspect
import re
from functools import cache

import pytest

from tests.docs.pages import DOCS
from tests.test_house import DOORS, public

pytestmark = pytest.mark.seconds(10)

FIRST = ["adaptive", "controllers"]  # where names that several packages export are documented
LAUNCHERS = {door for door in DOORS if door.startswith("launchers")}  # for our own packages; users have the command
PUBLIC = [*FIRST, *sorted(DOORS - LAUNCHERS - set(FIRST)), "controllers.simulate"]


@cache
def places() -> dict[tuple[str, int], str]:
    """Where each public thing is to be found, `door.name`: of the doors that pass it on, at the first."""
    found: dict[tuple[str, int], str] = {}
    for door in PUBLIC:
        for name, thing in public(importlib.import_module(door)).items():
            if not inspect.ismodule(thing):
                found.setdefault((name, id(thing)), f"{door}.{name}")
    return found


@cache
def documented() -> list[str]:
    """What the pages of the reference are about."""
    pages = [page.read_text() for page in DOCS if page.parent.name == "api"]
    return [name for page in pages for name in re.findall(r"^::: (\S+)", page, re.MULTILINE)]


@pytest.mark.parametrize("door", PUBLIC)
def test_every_public_name_is_documented(door):
    names = [name for name in places().values() if name.rpartition(".")[0] == door]
    missing = [f"::: {name}" for name in names if name not in documented()]
    assert missing == [], "to be added to a page of docs/api"


def test_names_are_documented_once_and_private_ones_not():
    assert [name for name in set(documented()) if documented().count(name) > 1] == []
    assert set(documented()) - set(places().values()) == set()
