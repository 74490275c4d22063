"""The command `adaptive`: a group of those that packages register as entry points of the group `adaptive.commands`.

    [project.entry-points."adaptive.commands"]
    mine = "my_package.command:mine"          # a click command

They are imported when they are called, and not to be listed: most import JAX.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points, version

import click

NAME = "adaptive-dataflow"
GROUP = "adaptive.commands"
OURS = {
    "run": "Start a job of several ranks, as mpirun does.",
    "doctor": "Say what there is, what is wrong with it, and what to type.",
    "report": "Make a page of a recorded run.",
    "replay": "Try policies on a recorded run.",
    "simulate": "Try policies on simulated clusters.",
}


class _Commands(click.Group):
    """Commands by their entry points."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*OURS, *sorted(set(_registered()) - set(OURS))]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = _registered().get(cmd_name)
        if entry is None and cmd_name not in OURS:
            return None
        if entry is None:
            raise click.ClickException(
                f"{cmd_name!r} is not registered: what is installed of {NAME} is older than its code.{_intruder()}\n"
                f"Install it again:  pip install --upgrade {NAME}    or, from a checkout:  pip install -e ."
            )
        try:
            command = entry.load()
        except (ImportError, AttributeError) as error:
            raise click.ClickException(
                f"{cmd_name!r} ({entry.value}) cannot be loaded: {error}{_intruder()}"
            ) from error
        if not isinstance(command, click.Command):
            raise click.ClickException(f"{cmd_name!r} ({entry.value}) is to be a click command; it is {command!r}")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        registered = _registered()
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, OURS.get(name) or _origin(registered[name])) for name in self.list_commands(ctx)]
            )


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name=NAME, message="%(package)s %(version)s")
def adaptive() -> None:
    """Adaptive control for data-parallel training in JAX.

    `adaptive COMMAND --help` says more. Another package adds a command by an entry point of the group
    adaptive.commands.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line. Does not return."""
    adaptive(None if arguments is None else list(arguments), prog_name="adaptive")


def intruder() -> str:
    """What to say where another project's package `adaptive` is installed, which lies where ours does; "" if not."""
    try:
        other = distribution("adaptive")
    except PackageNotFoundError:
        return ""
    return (
        f"The package named adaptive ({other.version}) is installed: another project, whose files overwrite "
        "ours, since its import name is the same."
    )


def how_to_remove_it() -> str:
    """What to type then."""
    return f"pip uninstall adaptive && pip install --force-reinstall --no-deps {NAME}=={_version()}"


def _intruder() -> str:
    return f"\n{said}\nRemove it:  {how_to_remove_it()}" if (said := intruder()) else ""


def _version() -> str:
    try:
        return version(NAME)
    except PackageNotFoundError:
        return "…"


def _registered() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _origin(entry: EntryPoint) -> str:
    return f"Of the package {entry.dist.name}." if entry.dist is not None else f"Of {entry.module}."
