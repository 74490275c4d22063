"""Try policies on a simulated cluster, or on a recorded run.

adaptive simulate step_change --png step_change.png
adaptive replay trace.jsonl --policy balance
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from adaptive.base.decision import Decision, Observation
from adaptive.base.errors import RecordError
from controllers._policy import stateless
from controllers.policies.schedule import schedule

from . import _scenarios
from ._line_up import LINE_UP, hooked
from ._recording import Recording, read_trace
from ._replay import fit
from ._scenarios import Scenario, scenario
from ._simulation import SIGNALS, Hooked
from ._simulation import simulate as simulated
from ._tables import compare, draw, table

SIMULATED = ("equal", "static", "proportional", "leader_straggler", "lb_bsp", "balance")
REPLAYED = ("equal", "proportional", "balance")
POLICY = f"""
\b
A policy is
  NAME               one of `adaptive simulate --list`
  NAME@EVERY         which decides at every EVERY-th step
  MODULE:FUNCTION    yours: a function without arguments that makes a
                     controllers.Policy

Values that its reads= can name, by default seconds:
{", ".join(SIGNALS)}
"""
_SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
_FILE = click.Path(path_type=Path)


def _policy_option(default: str) -> Callable[[Callable], Callable]:
    text = f"A policy to compare; may be repeated. Default: {default}."
    return click.option("--policy", "policies", multiple=True, metavar="POLICY", help=text)


@click.command("simulate", context_settings=_SETTINGS, epilog=POLICY)
@click.argument("scenarios", nargs=-1, metavar="[SCENARIO]...")
@_policy_option(", ".join(SIMULATED))
@click.option("--workers", type=click.IntRange(2), default=8, show_default=True, help="Number of workers.")
@click.option("--steps", type=click.IntRange(2), default=600, show_default=True, help="Number of steps.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of all random numbers.")
@click.option("--png", type=_FILE, metavar="FILE", help="Plot seconds per step, batch sizes and the best split.")
@click.option("--list", "listing", is_flag=True, help="List the scenarios and the policies.")
def simulate(
    scenarios: Sequence[str],
    policies: Sequence[str],
    workers: int,
    steps: int,
    seed: int,
    png: Path | None,
    listing: bool,
) -> None:
    """Compare policies on simulated clusters, under a virtual clock.

    \b
    adaptive simulate step_change --workers 16 --png step_change.png
    adaptive simulate all
    adaptive simulate contention --policy balance@10 --policy balance@1
    PYTHONPATH=. adaptive simulate drift --policy balance --policy mine:make_policy
    adaptive simulate scaling --policy equal --policy noise_workers --policy goodput_workers

    SCENARIO is a name that --list prints, or all.
    """
    if listing:
        return click.echo(_listing())
    if not scenarios:
        raise click.UsageError("name a scenario (see --list). To use a recorded run:  adaptive replay TRACE")
    if png and (len(scenarios) > 1 or scenarios[0] == "all"):
        raise click.UsageError("--png takes one scenario")
    with _complaints():
        compared = {name: hooked(name) for name in policies or SIMULATED}
        for number, name in enumerate(_scenarios.names() if list(scenarios) == ["all"] else scenarios):
            case = scenario(name, workers, steps, seed)
            runs = compare(case, compared, steps, seed)
            title = f"{name}, {case.cluster.workers} workers, {steps} steps: {case.about}"
            click.echo(("\n" if number else "") + title + "\n\n" + table(runs))
            if png:
                draw(runs, png, f"{name}: {case.about}")
    return None


@click.command("replay", context_settings=_SETTINGS, epilog=POLICY)
@click.argument("trace", type=_FILE)
@_policy_option(", ".join(REPLAYED))
@click.option("--run", "number", type=int, default=-1, metavar="N", help="Index of the run, if TRACE has several. "
    "Default: the last.")  # fmt: skip
@click.option("--png", type=_FILE, metavar="FILE", help="Plot seconds per step, batch sizes and the best split.")
def replay(trace: Path, policies: Sequence[str], number: int, png: Path | None) -> None:
    """Compare policies on a run that was recorded by `program.run(record=TRACE)`.

    \b
    adaptive replay trace.jsonl --policy balance --policy proportional
    """
    with _complaints():
        recording = read_trace(trace, number)
        _compared_with_what_was(recording, trace, {name: hooked(name) for name in policies or REPLAYED}, png)


@contextmanager
def _complaints() -> Iterator[None]:
    """Turn errors of the block into usage errors of the command."""
    try:
        yield
    except BrokenPipeError:  # `… | head`
        raise
    except (ValueError, OSError, RuntimeError) as error:
        raise click.UsageError(str(error)) from error


def _compared_with_what_was(recording: Recording, trace: Path, policies: dict[str, Hooked], png: Path | None) -> None:
    fitted, sizes = fit(recording), recording.sizes
    cluster, batches, last = fitted.cluster, sizes.sum(axis=1), len(sizes) - 1
    unknown = {"noise_scale": None, "cpu_available": cluster.cpu, "memory_available": cluster.memory}
    for name, hook in policies.items():
        for read in hook.policy.reads:
            if read in unknown and not unknown[read]:
                raise RecordError(
                    f"{name} reads {read}, which this trace does not determine for other sizes. Omit the policy, or "
                    f"run it in Python on the recorded values of a hook that received {read}:\n"
                    f"    controllers.simulate.replay(policy, read_trace({str(trace)!r}), hook)"
                )

    def repeat(observation: Observation) -> Decision:
        then = sizes[min(observation.step, last)]
        return Decision(int(then.sum()), tuple(map(float, then)))

    repeated = Hooked(stateless(repeat, "as recorded"), ())
    followed = Hooked(schedule(lambda step: batches[min(step, last)]), ())
    case = Scenario(trace.name, "", cluster, int(batches[0]), (followed,))
    runs = {"as recorded": simulated([repeated], cluster, sizes[0].tolist(), last + 1)}
    runs |= compare(case, policies, last + 1)
    click.echo(f"{trace}: {recording.workers} workers, {last + 1} steps\n\n{table(runs)}")
    if guessed := int((~fitted.certain).sum()):
        click.echo(
            f"\nThe batch of {guessed} workers hardly changed in this run: how their time depends on it is a guess."
        )
    if png:
        draw(runs, png, f"{trace.name}, replayed")


def _listing() -> str:
    scenarios = [(name, _scenarios.about(name)) for name in _scenarios.names()]
    policies = [(name, contender.about) for name, contender in LINE_UP.items()]
    width = max(len(name) for name, _ in scenarios + policies)
    listed = ["\n".join(f"  {name:{width}}  {text}" for name, text in rows) for rows in (scenarios, policies)]
    return f"scenarios:\n{listed[0]}\n\npolicies:\n{listed[1]}"
