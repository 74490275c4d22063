"""Compare the installed JAX with the newest one that this version of the library was tested with."""

from __future__ import annotations

import warnings
from functools import lru_cache

import jax

NEWEST_TESTED = (0, 12)  # JAX's series (0.12.x): the newest one with which the whole suite has passed


class UntestedVersionWarning(UserWarning):
    """The installed JAX is newer than the newest one that was tested."""


def untested(jax_version: str) -> str:
    """Return a sentence that says that this version of JAX is newer than the tested ones, or "" if it is not.

    Args:
      jax_version: as in `jax.__version__`; text that is not a version counts as tested.
    """
    major, _, rest = jax_version.partition(".")
    minor = rest.partition(".")[0]
    if not (major.isdigit() and minor.isdigit()) or (int(major), int(minor)) <= NEWEST_TESTED:
        return ""
    newest = ".".join(map(str, NEWEST_TESTED))
    return f"JAX {jax_version} is newer than the newest tested series, {newest}."


@lru_cache(maxsize=1)  # once per process
def warn_if_untested() -> None:
    """Warn once per process if the installed JAX is newer than the tested ones."""
    if said := untested(jax.__version__):
        warnings.warn(
            f"{said} If this program fails inside adaptive, install a tested one: "
            f'pip install "{tested_range()}"  (see docs/install.md)',
            UntestedVersionWarning,
            stacklevel=5,  # the line that builds a program, outside the wrappers of its __init__
        )


def tested_range() -> str:
    """Return the requirement for pip that excludes series of JAX newer than the tested ones."""
    major, minor = NEWEST_TESTED
    return f"jax<{major}.{minor + 1}"
