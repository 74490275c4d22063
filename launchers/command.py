"""The command `adaptive`.

A subcommand is imported when it is called, not when commands are listed, because most import JAX.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution, version

import click

NAME = "adaptive-dataflow"
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
    """A click group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(OURS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in OURS:
            return None
        module, _, name = OURS[cmd_name][0].partition(":")
        try:
            command = getattr(import_module(module), name)
        except (ImportError, AttributeError) as error:
            intruded = f"\n{said}\nRemove it:  {how_to_remove_it()}" if (said := intruder()) else ""
            raise click.ClickException(f"{cmd_name!r} cannot be loaded: {error}{intruded}") from error
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in OURS.items()])


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name=NAME, message="%(package)s %(version)s")
def adaptive() -> None:
    """Adaptive control for data-parallel training in JAX.

    `adaptive COMMAND --help` describes a command.
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
    try:
        own = version(NAME)
    except PackageNotFoundError:
        own = "…"
    return f"pip uninstall adaptive && pip install --force-reinstall --no-deps {NAME}=={own}"
