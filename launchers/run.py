"""`adaptive run`: start a job with the MPI's own launcher, and end it with the right exit code."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from . import mpirun
from .ending import LAUNCHER
from .job import Job
from .mpirun import Host, UsageError
from .resources import BIND, CORES, GPUS, THREADS, cores, cpu_quota, usable
from .restarts import Restarts
from .verdict import say

_OF_JAX = ("JAX_", "XLA_")  # prefixes of the environment variables that are forwarded to ranks on other hosts
_OF_PYTHON = ("PYTHONPATH", *THREADS)
_BATCH_SYSTEMS = ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE", "COBALT_NODEFILE", "FLUX_JOB_ID")
_ELSEWHERE = ("-wdir", "--wdir", "-wd", "--wd", "--set-cwd-to-session-dir")  # options that change the script's folder


_SECONDS = click.FloatRange(0.0, 1e9, min_open=True)


class _RunCommand(click.Command):
    """A click command that takes its own options from the words before the program, and leaves the rest to mpirun."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args:
            args = ["--help"]
        options, words = mpirun.split(args)
        known = {name: option for option in self.get_params(ctx) for name in option.opts}
        ours: list[str] = []
        theirs: list[str] = []
        rest = iter(options)
        for word in rest:
            option = known.get(word) or (known.get(word.partition("=")[0]) if word.startswith("--") else None)
            (theirs if option is None else ours).append(word)
            if isinstance(option, click.Option) and not option.is_flag and "=" not in word:
                ours += [value for value in [next(rest, None)] if value is not None]
        if not words and not any(word in ctx.help_option_names for word in ours):
            raise click.UsageError(
                "no program given. Name a script (train.py) or a module (-m train), or put another command after --:\n"
                "    adaptive run -n 4 -- ./start.sh"
            )
        super().parse_args(ctx, ours)
        ctx.params |= {"options": theirs, "words": words}
        return []

    def invoke(self, ctx: click.Context) -> Any:
        """Run the job. Ctrl-C before its start gives the same exit code as later: 130."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise SystemExit(128 + signal.SIGINT) from None

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["[OPTIONS]", "[OPTIONS OF MPIRUN]", "PROGRAM [ARGUMENTS]"]


@click.command(
    "run", cls=_RunCommand, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120}
)
@click.option("-n", "--n", "-np", "--np", "ranks", type=click.IntRange(1), metavar="N",
    help="Number of ranks. By default one per slot of the hosts, task of the Slurm job, GPU, or core.")  # fmt: skip
@click.option("-H", "--host", "--hosts", "hosts_", multiple=True, metavar="A:2,B:2",
    help="Hosts and their slots. Without a number a host has one slot, or one per GPU.")  # fmt: skip
@click.option("--hostfile", "-hostfile", "--machinefile", "-machinefile", type=click.Path(path_type=Path), metavar="F",
    help="The same in a file, one host per line:  node1 slots=2  or  node1:2")  # fmt: skip
@click.option("--gpus-per-host", type=click.IntRange(0), metavar="N",
    help="Each rank sees an equal part of N GPUs (CUDA_VISIBLE_DEVICES), by its number on its host; 0: every rank sees "
    "all. By default, each of several ranks on a host sees one.")  # fmt: skip
@click.option("--oversubscribe", "-oversubscribe", is_flag=True, help="Allow more ranks than slots.")
@click.option("--grace", type=_SECONDS, default=30.0, show_default=True, metavar="S",
    help="Seconds between a signal (TERM, INT, HUP), which is passed to all ranks, and the forced end of the job. A "
    "second signal ends it at once. USR1 and USR2 are passed on and do not end the job.")  # fmt: skip
@click.option("--host-timeout", type=_SECONDS, default=30.0, show_default=True, metavar="S",
    help="Seconds after which the job ends if a host does not answer.")  # fmt: skip
@click.option("--restarts", type=click.IntRange(0), default=0, show_default=True, metavar="N",
    help="Start a job that fails again, at most N times in a row without a new checkpoint on disk, on the hosts that "
    "answer then. The program must restore its checkpoint.")  # fmt: skip
@click.option("--mpirun", "launcher", metavar="PATH", help="The launcher. By default that of the MPI that mpi4py "
    "loads: beside the library that MPI4PY_LIBMPI names, beside this Python, or the first on PATH.")  # fmt: skip
@click.option("--show", is_flag=True, help="Print the command line without running it.")
def run(
    ranks: int | None,
    hosts_: Sequence[str],
    hostfile: Path | None,
    gpus_per_host: int | None,
    oversubscribe: bool,
    grace: float,
    host_timeout: float,
    restarts: int,
    launcher: str | None,
    show: bool,
    options: list[str],
    words: list[str],
) -> None:
    """Start a job of several ranks with mpirun and the required flags, and end with the right exit code.

    \b
    PROGRAM is one of
      train.py ...         a script
      -m train ...         a module
      python train.py ...  the same, with this Python
      -- COMMAND ...       any other command

    Options that are not listed below are passed to mpirun: -x NAME, --mca btl tcp,self, ... The command line of mpirun
    is printed first.

    If a host has enough cores, each rank binds itself to its own, and XLA gets as many threads; otherwise ranks share
    the cores. mpirun's own options for placing or binding ranks take precedence. Open MPI 5 gets --with-ft ulfm, so
    that training continues when ranks are lost. Root is allowed to run it.

    Exit code: 0 if the program succeeded, even if ranks were lost in a world or left. Otherwise the code of the first
    rank that failed, or 128 + the signal that killed it outside a world. The command ends at most 5 seconds after the
    program, whatever mpirun does.
    """
    try:
        mpi = mpirun.ask(launcher) if launcher else mpirun.find()
        each = gpus_per_host or 1
        where = mpirun.named_hosts(",".join(hosts_), each) if hosts_ else []
        where += mpirun.listed_hosts(hostfile, each) if hostfile else []
        mpirun.on_hosts(mpi, where)  # raises if the launcher's option is unknown
        command = mpirun.program(words)
        runs_here = not where and not any(option in _ELSEWHERE for option in options)
        if runs_here and words[0].endswith(".py") and not Path(words[0]).exists():  # one error instead of one a rank
            raise UsageError(f"there is no {words[0]} in {Path.cwd()}.")
    except (UsageError, ValueError, OSError) as error:
        raise click.UsageError(str(error)) from error
    here = usable(cores(), cpu_quota())
    chosen, one_per = (ranks, "") if ranks else _default_ranks(where, gpus_per_host, here, os.environ)
    if one_per:
        say(f"-n is not given: starting {chosen} ranks, one per {one_per}.")
    elsewhere = bool(where) or any(map(os.environ.get, _BATCH_SYSTEMS))  # then mpirun knows the slots
    how = mpirun.binding(options, os.environ)
    if not elsewhere and how == BIND and chosen > here:
        say(f"{chosen} ranks on {here} cores: the cores are oversubscribed.")
    ours = {} if gpus_per_host is None else {GPUS: str(gpus_per_host)}
    if how:
        ours[CORES] = f"{how} {chosen}"
    extra = {**ours, **mpirun.settings(mpi, options, os.environ)}
    placing: list[str] = []
    if mpi.name == "Open MPI":  # MPICH's launcher binds nothing, and allows more ranks than slots, by default
        placing += ["--oversubscribe"] if oversubscribe or (how and not elsewhere) else []
        placing += ["--bind-to", "none"] if how == BIND else []
    theirs = [name for name in os.environ if name.startswith(_OF_JAX) or name in _OF_PYTHON]
    forwarded = [LAUNCHER, *ours, *(theirs if where else [])]  # ranks on this host inherit all variables

    def on(there: Sequence[Host]) -> list[str]:
        n = chosen if there == where else min(chosen, sum(host.slots for host in there))
        given = ["-n", str(n), *mpirun.on_hosts(mpi, there), *placing, *options]
        return mpirun.line(mpi, given, command, forwarded)

    def in_words(whole: Sequence[str]) -> str:
        return shlex.join([*(["env", *(f"{name}={value}" for name, value in extra.items())] if extra else []), *whole])

    if show:
        click.echo(in_words(on(where)))
        return
    environ = {**mpirun.clean(), **extra}
    starts, again, there = Restarts(restarts), True, where
    while again:
        whole = on(there)
        job = Job(whole, environ, grace, host_timeout)
        end = asyncio.run(job.run(partial(click.echo, f"+ {in_words(whole)}", err=True)))
        again, said = starts.after(end)
        if said:
            say(said)
        if again and len(where) > 1:
            there = mpirun.answering(mpi, where, environ) or where
            if silent := [host.name for host in where if host not in there]:
                say(f"goes on without {', '.join(silent)}, which did not answer.")
    raise SystemExit(end.code)


def _default_ranks(where: Sequence[Host], gpus: int | None, here: int, environ: Mapping[str, str]) -> tuple[int, str]:
    """Return the default number of ranks, and the resource of which each rank gets one."""
    if gpus:
        nodes = environ.get("SLURM_JOB_NUM_NODES", "")
        return gpus * (len(where) or (int(nodes) if nodes.isdigit() else 1)), "GPU"
    if where:
        return sum(host.slots for host in where), "slot of the hosts"
    if tasks := environ.get("SLURM_NTASKS", ""):
        return int(tasks), "task of the Slurm job"
    return here, "core"


if __name__ == "__main__":
    run(prog_name="adaptive run")
