"""Try policies on a simulated cluster, or on a recorded run.

python -m controllers.simulate step_change --png step_change.png
python -m controllers.simulate --list
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from adaptive.extend import Decision, Observation
from controllers._policy import Policy
from controllers.policies.schedule import schedule

from . import _scenarios
from ._cluster import Cluster
from ._draw import draw
from ._line_up import LINE_UP, hooked
from ._recording import Recording, TraceError, read_trace
from ._replay import fit, replay
from ._scenarios import Scenario, scenario
from ._simulation import SIGNALS, Hooked, Simulation, simulate

DEFAULT = ("equal", "static", "proportional", "leader_straggler", "lb_bsp", "balance")
EPILOG = f"""\
examples:
  python -m controllers.simulate step_change --workers 16 --png step_change.png
  python -m controllers.simulate all
  python -m controllers.simulate affine --policy balance@10 --policy balance@1
  PYTHONPATH=. python -m controllers.simulate drift --policy balance --policy mine:make_policy
  python -m controllers.simulate scaling --policy equal --policy noise_workers --policy goodput_workers
  python -m controllers.simulate listing_1 spot --policy equal --policy balance
  python -m controllers.simulate --replay trace.jsonl --policy balance --policy proportional
  python -m controllers.simulate --replay trace.jsonl --exact 0/balance --policy proportional

a policy is:
  NAME               one of --list
  NAME@EVERY         which decides at every EVERY-th step
  MODULE:FUNCTION    yours: a function without arguments that makes a controllers.Policy

values that --reads can name: {", ".join(SIGNALS)}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        _check(options, parser)
        if options.list:
            _say(_listing())
        elif options.replay:
            _replay(options)
        else:
            _simulate(options)
    except (ValueError, OSError, RuntimeError) as error:
        _complain(f"{parser.prog}: error: {error}")
        return 2
    except BrokenPipeError:
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m controllers.simulate",
        description="Try policies on a simulated cluster, or on a recorded run.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("scenario", nargs="*", help="one or more of --list, or all")
    parser.add_argument("--list", action="store_true", help="say what scenarios and policies there are")
    parser.add_argument(
        "--policy",
        action="append",
        metavar="POLICY",
        help=f"which to compare; may be repeated (default: {', '.join(DEFAULT)})",
    )
    parser.add_argument("--reads", metavar="VALUES", help="what MODULE:FUNCTION policies are given (default: seconds)")
    parser.add_argument("--workers", type=int, default=8, help="how many (default: 8)")
    parser.add_argument("--steps", type=int, default=600, help="how many (default: 600)")
    parser.add_argument("--seed", type=int, default=0, help="of all that is random (default: 0)")
    parser.add_argument("--png", metavar="FILE", type=Path, help="draw seconds per step, sizes and the best split")
    parser.add_argument("--replay", metavar="TRACE", type=Path, help="a run that Program.run(record=TRACE) wrote down")
    parser.add_argument("--run", type=int, default=-1, help="which run, if TRACE holds several (default: the last)")
    parser.add_argument(
        "--exact", metavar="HOOK", help="show the policies what HOOK of TRACE was shown; list decisions"
    )
    return parser


def _check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if not (options.list or options.replay or options.scenario):
        parser.error("name a scenario (see --list), or a trace to --replay")
    if options.replay and options.scenario:
        parser.error("either a scenario or --replay, not both")
    if options.exact and not options.replay:
        parser.error("--exact goes with --replay")
    if options.exact and options.png:
        parser.error("--exact lists decisions; there is nothing to draw")
    if options.workers < 2 or options.steps < 2:
        parser.error("--workers and --steps are at least 2")
    if options.png and (len(options.scenario) > 1 or options.scenario == ["all"]):
        parser.error("--png draws one scenario")


# --- scenarios --------------------------------------------------------------------------------------------------------


def _simulate(options: argparse.Namespace) -> None:
    chosen = _scenarios.names() if options.scenario == ["all"] else options.scenario
    policies = _policies(options)
    for number, name in enumerate(chosen):
        case = scenario(name, options.workers, options.steps, options.seed)
        runs = compare(case, policies, options.steps, options.seed)
        title = f"{name}, {case.cluster.workers} workers, {options.steps} steps: {case.about}"
        _say(("\n" if number else "") + title + "\n\n" + table(runs))
        if options.png:
            draw(runs, options.png, f"{name}: {case.about}")


def compare(case: Scenario, policies: dict[str, Hooked], steps: int, seed: int = 0) -> dict[str, Simulation]:
    """Run policies on one scenario, under the same noise.

    Args:
      case: the scenario.
      policies: by name.
      steps: how many.
      seed: of the noise.

    Returns:
      What happened, by policy.
    """
    return {
        name: simulate([*case.before, hook], case.cluster, case.global_batch, steps, seed=seed)
        for name, hook in policies.items()
    }


def table(runs: dict[str, Simulation]) -> str:
    """The runs of one scenario, as a table in Markdown. Times are compared up to as many examples as all have done.

    Args:
      runs: by policy; the others are compared with the first. Where workers are in reserve, it says how many were there
        on average, what they have spent in all, and how much they have learned per second (`Simulation.goodput`).
    """
    examples = min(int(run.global_batch.sum()) for run in runs.values())
    base = next(iter(runs))
    counted = any(run.cluster is not None and run.cluster.first is not None for run in runs.values())
    more = ("workers", "worker-s", "goodput") if counted else ()
    rows: list[tuple[str, ...]] = [
        ("policy", "mean step", "best split", "over best", "adjustments", f"speed-up over {base}", *more)
    ]
    for name, run in runs.items():
        took, best = run.step_seconds.mean(), run.ideal_seconds.mean()
        gain = runs[base].seconds_to(examples) / run.seconds_to(examples)
        cells = (name, _ms(took), _ms(best), f"{took / best:.3f}", str(len(run.adjustments)), f"{gain:.2f}")
        spent = (f"{run.workers.mean():.1f}", f"{run.worker_seconds:.4g}", f"{run.goodput:.4g}") if counted else ()
        rows.append((*cells, *spent))
    return _aligned(rows)


# --- recorded runs ----------------------------------------------------------------------------------------------------


def _replay(options: argparse.Namespace) -> None:
    recording = read_trace(options.replay, options.run)
    if options.exact:
        _exact(recording, options)
        return
    fitted, steps = fit(recording), len(recording.steps)
    batches = fitted.global_batch
    case = Scenario(options.replay.name, "", fitted.cluster, int(batches[0]), (_followed(batches),))
    policies = _policies(options, default=("equal", "proportional", "balance"))
    for name, hook in policies.items():
        for read in () if callable(hook.reads) else hook.reads:
            if read not in _known(fitted.cluster):
                raise TraceError(
                    f"{name} reads {read}, and this trace does not tell what that would have been with other sizes. "
                    f"Leave the policy out, or show it the very observations of a hook that was given it:  --exact HOOK"
                )
    runs = {"as recorded": _as_recorded(recording, fitted.cluster), **compare(case, policies, steps)}
    _say(f"{options.replay}: {recording.workers} workers, {steps} steps\n\n{table(runs)}")
    guessed = int((~fitted.certain).sum())
    if guessed:
        _say(f"\nThe batch of {guessed} workers hardly changed in this run: how their time goes with it is guessed.")
    if options.png:
        draw(runs, options.png, f"{options.replay.name}, replayed")


def _known(cluster: Cluster) -> list[str]:
    """What the cluster of a recorded run can say to a policy."""
    seen = {"cpu_available": cluster.cpu, "memory_available": cluster.memory}
    return ["seconds", "iteration_seconds", "capacities", *(name for name, trace in seen.items() if trace)]


def _exact(recording: Recording, options: argparse.Namespace) -> None:
    recorded = [(step.step, step.decision) for step in recording.steps if step.decision]
    lines = [("step", "policy", "workers", "global batch", "shares")]
    lines += [(str(step), "as recorded", *_asked(decision)) for step, decision in recorded]
    for name, hook in _policies(options, default=("balance",)).items():
        every = hook.every if "@" in name else None
        reads = hook.reads if not callable(hook.reads) and (":" not in name or options.reads) else None
        asked = replay(hook.policy, recording, options.exact, reads, every)
        lines += [(str(step), name, *_asked(decision)) for step, decision in asked]
    lines[1:] = sorted(lines[1:], key=lambda line: int(line[0]))
    _say(_aligned(lines))


def _asked(decision: Decision) -> tuple[str, str, str]:
    shares = "" if decision.shares is None else " ".join(f"{share:g}" for share in decision.shares)
    workers, batch = ("" if number is None else str(number) for number in (decision.workers, decision.global_batch))
    return workers, batch, shares


def _followed(batches: np.ndarray) -> Hooked:
    """The global batch goes as it did in the run."""

    return Hooked(schedule(lambda step: batches[min(step, len(batches) - 1)]), ())


def _as_recorded(recording: Recording, cluster: Cluster) -> Simulation:
    sizes = recording.sizes

    def update(observation: Observation, state: tuple[()]) -> tuple[Decision | None, tuple[()]]:
        then = sizes[min(observation.step, len(sizes) - 1)]
        if tuple(then) == observation.batch_sizes:
            return None, state
        return Decision(int(then.sum()), tuple(map(float, then))), state

    policy = Policy(lambda n_workers: (), update, "as recorded")
    return simulate([Hooked(policy, ())], cluster, sizes[0].tolist(), len(sizes))


# --- policies, text ---------------------------------------------------------------------------------------------------


def _policies(options: argparse.Namespace, default: Sequence[str] = DEFAULT) -> dict[str, Hooked]:
    reads = options.reads.split(",") if options.reads else None
    return {name: hooked(name, reads if ":" in name else None) for name in options.policy or default}


def _listing() -> str:
    scenarios = [(name, _scenarios.about(name)) for name in _scenarios.names()]
    policies = [(name, contender.about) for name, contender in LINE_UP.items()]
    width = max(len(name) for name, _ in scenarios + policies)
    parts = [
        f"{head}:\n" + "\n".join(f"  {n:{width}}  {text}" for n, text in rows)
        for head, rows in (("scenarios", scenarios), ("policies", policies))
    ]
    return "\n\n".join(parts)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    body = [rows[0], rule, *rows[1:]]
    cells = [
        [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True))] for r in body
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def _complain(text: str) -> None:
    sys.stderr.write(text + "\n")
