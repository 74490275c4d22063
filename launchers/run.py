"""`adaptive run`: start the MPI's own launcher, and see to it that the job ends, and how."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from . import hosts
from .cores import cores
from .ending import LAUNCHER
from .job import Job, addresses
from .mpirun import UsageError, ask, clean, find, line, on_hosts, program, script, settings, split
from .places import THREADS, Places, places
from .rank import GPUS

_OF_JAX = ("JAX_", "XLA_")  # what ranks on other hosts need of our environment, beside what is said
_OF_PYTHON = ("PYTHONPATH", *THREADS)
_ELSEWHERE = ("-wdir", "--wdir", "-wd", "--wd", "--set-cwd-to-session-dir")  # a script is looked for there


class _Seconds(click.ParamType):
    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """More than 0, and no more than there are."""
        try:
            seconds = float(value)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < float("inf"):
            self.fail(f"{value!r}: seconds are a number, and more than 0", param, ctx)
        return seconds


class _Run(click.Command):
    """Options that are ours are taken out of what stands before the program; all others are the launcher's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args:
            args = ["--help"]
        options, words = split(args)
        ours, theirs = self._divide(ctx, options)
        if not words and not any(word in ctx.help_option_names for word in ours):
            stray = next((word for word in theirs if Path(word).is_file()), "")
            raise click.UsageError(
                "which program? Name a script (train.py), or a module (-m train), or put any other command behind --:\n"
                f"    adaptive run -n 4 -- {stray or './start.sh'}"
            )
        super().parse_args(ctx, ours)
        ctx.params |= {"options": theirs, "words": words}
        return []

    def invoke(self, ctx: click.Context) -> Any:
        """Run the job. Ctrl-C before it has begun ends with the code that it has later."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise SystemExit(128 + signal.SIGINT) from None

    def _divide(self, ctx: click.Context, words: Sequence[str]) -> tuple[list[str], list[str]]:
        known = {name: option for option in self.get_params(ctx) for name in option.opts}
        ours: list[str] = []
        theirs: list[str] = []
        rest = iter(words)
        for word in rest:
            option = known.get(word) or (known.get(word.partition("=")[0]) if word.startswith("--") else None)
            (theirs if option is None else ours).append(word)
            if isinstance(option, click.Option) and not option.is_flag and "=" not in word:
                ours += [value for value in [next(rest, None)] if value is not None]
        return ours, theirs

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["[OPTIONS]", "[OPTIONS OF MPIRUN]", "PROGRAM [ARGUMENTS]"]


@click.command("run", cls=_Run, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option("-n", "-np", "--np", "ranks", type=click.IntRange(1), metavar="N", help="How many ranks. By default one "
    "for each place of the hosts, task of the Slurm job, GPU, or core.")  # fmt: skip
@click.option("-H", "--host", "--hosts", "hosts_", multiple=True, metavar="A:2,B:2",
    help="Hosts, and how many ranks there is a place for on each: else one, or one for each GPU.")  # fmt: skip
@click.option("--hostfile", "-hostfile", "--machinefile", "-machinefile", type=click.Path(path_type=Path), metavar="F",
    help="The same in a file, one a line:  node1 slots=2  or  node1:2")  # fmt: skip
@click.option("--gpus-per-host", type=click.IntRange(0), metavar="N",
    help="Each rank sees one of so many GPUs (CUDA_VISIBLE_DEVICES), by its number on its host; 0: all see all. By "
    "default one of those that are there, where several ranks are on a host.")  # fmt: skip
@click.option("--oversubscribe", "-oversubscribe", is_flag=True, help="There may be more ranks than places.")
@click.option("--grace", type=_Seconds(), default=30.0, show_default=True, metavar="S",
    help="Seconds between a signal (TERM, INT, HUP), which is passed to all ranks, and the end of what is still there. "
    "A second signal ends it at once. USR1 and USR2 are passed on, and end nothing.")  # fmt: skip
@click.option("--host-timeout", type=_Seconds(), default=30.0, show_default=True, metavar="S",
    help="Seconds after which a host that does not answer is cut off: its ranks end, the others go on.")  # fmt: skip
@click.option("--mpirun", "launcher", metavar="PATH", help="The launcher. By default that of the MPI that mpi4py "
    "loads: beside the library that MPI4PY_LIBMPI names, beside this Python, or the first on the PATH.")  # fmt: skip
@click.option("--show", is_flag=True, help="Print the line that would be run, and do not run it.")
def run(
    ranks: int | None,
    hosts_: Sequence[str],
    hostfile: Path | None,
    gpus_per_host: int | None,
    oversubscribe: bool,
    grace: float,
    host_timeout: float,
    launcher: str | None,
    show: bool,
    options: list[str],
    words: list[str],
) -> None:
    """Start a job of several ranks, as mpirun does, with what has to be said to it each time, and end with the right
    exit code.

    \b
    PROGRAM is one of
      train.py ...         a script
      -m train ...         a module
      python train.py ...  the same, with a Python of its own
      -- COMMAND ...       anything else; it runs as it is

    All options that are not below are mpirun's: -x NAME, --mca btl tcp,self, ... The line that is run is printed first.

    Each rank gets cores of its own, where there are enough, and XLA as many threads; else ranks share the cores.
    Options of mpirun that place or bind ranks take the place of that. Open MPI 5 is told --with-ft ulfm, so that
    the others go on when ranks are lost. Root is allowed to run it.

    Exit code: 0 if the program ended well, no matter which ranks were lost in a world or left. Else the code of the
    first rank that ended badly, or 128 + the signal that killed it outside a world. At most 5 seconds after the end of
    the program, whatever mpirun does.
    """
    try:
        mpi = ask(launcher) if launcher else find()
        each = gpus_per_host or 1
        where = hosts.named(",".join(hosts_), each) if hosts_ else []
        where += hosts.listed(hostfile, each) if hostfile else []
        chosen = places(
            mpi, ranks, where, cores(), gpus=gpus_per_host or None, oversubscribe=oversubscribe, options=options
        )
        placed = ["-n", str(chosen.ranks), *on_hosts(mpi, where), *chosen.options]
        command = program(words)
        _check_script(script(command), options, where)
    except (UsageError, ValueError, OSError) as error:
        raise click.UsageError(str(error)) from error
    if gpus_per_host is not None:
        chosen.environ[GPUS] = str(gpus_per_host)
    extra = {**chosen.environ, **settings(mpi, options, os.environ)}
    forwarded = [LAUNCHER, *_forwarded(chosen, elsewhere=bool(where), environ=os.environ)]
    whole = line(mpi, [*placed, *options], command, forwarded)
    shown = shlex.join([*(["env", *(f"{name}={value}" for name, value in extra.items())] if extra else []), *whole])
    for sentence in chosen.said:
        click.echo(f"adaptive run: {sentence}", err=True)
    if show:
        click.echo(shown)
        return
    job = Job(whole, {**clean(), **extra}, grace, host_timeout, addresses())
    raise SystemExit(asyncio.run(job.run(lambda: click.echo(f"+ {shown}", err=True))))


def _forwarded(chosen: Places, elsewhere: bool, environ: Mapping[str, str]) -> list[str]:
    """Variables that ranks on other hosts need. Those on this one have all there are."""
    theirs = [name for name in environ if name.startswith(_OF_JAX) or name in _OF_PYTHON] if elsewhere else []
    return [*chosen.environ, *(name for name in theirs if name not in chosen.environ)]


def _check_script(name: str | None, options: Sequence[str], where: Sequence[hosts.Host]) -> None:
    """Ranks would say so too, all of them."""
    if name is None or Path(name).exists() or where or any(option in _ELSEWHERE for option in options):
        return
    path = Path(name)
    there = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
    close = get_close_matches(path.name, there, 1)
    meant = f" Did you mean {path.with_name(close[0])}?" if close else ""
    raise UsageError(f"there is no {name} in {Path.cwd()}.{meant}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a job; returns its exit code, as `adaptive run` does."""
    try:
        run.main(None if arguments is None else list(arguments), prog_name="adaptive run")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
