"""The command `adaptive`: a click group of our own commands, and of the entry points of the group `adaptive.commands`.

    [project.entry-points."adaptive.commands"]
    mine = "my_package.command:mine"          # a click command

A command is imported when it is called, not when commands are listed, because most commands import JAX.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points, version

import click

NAME = "adaptive-dataflow"
GROUP = "adaptive.commands"
OURS = {
    "run": ("launchers.run:run", "Start a job of several ranks, as mpirun does."),
    "doctor": ("collectives.doctor.command:doctor", "Check this machine or job, and advise what to change."),
    "report": (
        "adaptive.html_report.command:report",
        "Write a page on a recorded run, or say what differs between two.",
    ),
    "replay": ("controllers.simulate._command:replay", "Compare policies on a recorded run."),
    "simulate": ("controllers.simulate._command:simulate", "Compare policies on simulated clusters."),
}


class _Commands(click.Group):
    """A click group of our own commands and those of the installed entry points."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*OURS, *sorted(set(_registered()) - set(OURS))]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = EntryPoint(cmd_name, OURS[cmd_name][0], GROUP) if cmd_name in OURS else _registered().get(cmd_name)
        if entry is None:
            return None
        try:
            command = entry.load()
        except (ImportError, AttributeError) as error:
            intruded = f"\n{said}\nRemove it:  {how_to_remove_it()}" if (said := intruder()) else ""
            raise click.ClickException(f"{cmd_name!r} ({entry.value}) cannot be loaded: {error}{intruded}") from error
        if not isinstance(command, click.Command):
            raise click.ClickException(f"{cmd_name!r} ({entry.value}) must be a click command, not {command!r}")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        ours = [(name, text) for name, (_, text) in OURS.items()]
        theirs = [(name, _origin(entry)) for name, entry in sorted(_registered().items()) if name not in OURS]
        with formatter.section("Commands"):
            formatter.write_dl([*ours, *theirs])


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name=NAME, message="%(package)s %(version)s")
def adaptive() -> None:
    """Adaptive control for data-parallel training in JAX.

    `adaptive COMMAND --help` describes a command. Other packages add commands as entry points of the group
    adaptive.commands.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, and exit with the command's exit code."""
    adaptive(None if arguments is None else list(arguments), prog_name="adaptive")


def intruder() -> str:
    """Return a message if another project's package named `adaptive` is installed over this one; "" if not."""
    try:
        other = distribution("adaptive")
    except PackageNotFoundError:
        return ""
    return (
        f"The package named adaptive ({other.version}) is installed. It is another project with the same import name, "
        "and its files overwrite ours."
    )


def how_to_remove_it() -> str:
    """Return the shell command that removes the other package and restores this one."""
    return f"pip uninstall adaptive && pip install --force-reinstall --no-deps {NAME}=={_version()}"


def _version() -> str:
    try:
        return version(NAME)
    except PackageNotFoundError:
        return "…"


def _registered() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _origin(entry: EntryPoint) -> str:
    return f"From the package {entry.dist.name}." if entry.dist is not None else f"From {entry.module}."
