"""Every public name has a place in the pages of the reference, and no other name has."""

from __future__ import annotations

import importlib
import pkgutil
import re
from functools import cache

import pytest

import adaptive
from tests.docs.pages import DOCS
from tests.test_house import DOORS, public

# Beside what other packages come in by: what of `adaptive` passes names on, as rooms do not.
INSIDE = [f"adaptive.{module.name}" for module in pkgutil.iter_modules(adaptive.__path__) if module.name[0] != "_"]
DOORWAYS = {door for door in INSIDE if public(importlib.import_module(door))}
PUBLIC = ["adaptive", "controllers", *sorted((DOORS | DOORWAYS) - {"adaptive", "controllers"}), "controllers.simulate"]


@cache
def places() -> dict[tuple[str, int], str]:
    """Where each public thing is to be found, `door.name`: of the doors that pass it on, at the first."""
    found: dict[tuple[str, int], str] = {}
    for door in PUBLIC:
        for name, thing in public(importlib.import_module(door)).items():
            found.setdefault((name, id(thing)), f"{door}.{name}")
    return found


@cache
def told() -> list[str]:
    """What the pages of the reference are about."""
    pages = [page.read_text() for page in DOCS if page.parent.name == "api"]
    return [name for page in pages for name in re.findall(r"^::: (\S+)", page, re.MULTILINE)]


@pytest.mark.parametrize("door", PUBLIC)
def test_every_public_name_has_a_place(door):
    names = [name for name in places().values() if name.rpartition(".")[0] == door]
    missing = [f"::: {name}" for name in names if name not in told()]
    assert missing == [], "to be added to a page of docs/api"


def test_no_name_has_two_places_and_what_is_not_public_has_none():
    assert [name for name in set(told()) if told().count(name) > 1] == []
    assert set(told()) - set(places().values()) == set()
