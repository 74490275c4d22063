"""The distance of each policy that splits a batch from the best split, on each simulated cluster.

    python benchmarks/every_policy_on_every_scenario.py            # about 6 minutes of one core
    python benchmarks/every_policy_on_every_scenario.py --seeds 1 --steps 300

Every splitting policy runs on every cluster of `adaptive simulate --list` and of `_scenarios.py` whose workers are all
present from the start or join by themselves. Measured are the seconds until a number of examples is done, relative to
the best split in hindsight, which knows each step's speeds in advance but not its noise. One published policy also
changes the global batch: the more examples a step has, the less its fixed cost matters. So `balance` also runs on the
batch sizes of that policy.
"""

import _scenarios  # noqa: F401  (adds scenarios)
import numpy as np
from _measure import command_line, report

import controllers as ctrl
from controllers.published import arx, lb_bsp, memoryless, moving_average, proportional
from controllers.simulate import LINE_UP, Hooked, Simulation, hooked, names, scenario, simulate
from controllers.simulate._line_up import Contender

MORE = {
    "proportional-no-drop": lambda: proportional(drop=None),  # learns no upper bounds, which other load distorts
    "proportional-published": lambda: proportional(renormalize=False, drop=0.0),  # the global batch inflates
    "lb_bsp-arx": lambda: lb_bsp(arx(), n_inputs=2),
    "lb_bsp-average": lambda: lb_bsp(moving_average(0.2), dead_band=0.0),
    "lb_bsp-memoryless": lambda: lb_bsp(memoryless(), dead_band=0.0),
}
LINE_UP.update({name: Contender(make, "") for name, make in MORE.items()})

WORKERS = 8
FIRST_SEED = 7000  # lower ones were looked at while the constants of the model were chosen
INFLATES = "proportional-published"
SPLITS = [name for name, contender in LINE_UP.items() if contender.adapts == "split"]
PUBLISHED = [name for name in SPLITS if name not in ("equal", "balance", "lb_bsp-arx", INFLATES)]
BLIND = [name for name in PUBLISHED if "cpu_available" not in hooked(name).signals]
SHORT = {
    "proportional-published": "prop.-published",
    "proportional-no-drop": "prop.-no-drop",
    "leader_straggler": "leader_strag.",
    "lb_bsp-memoryless": "lb_bsp-last",
}


def over_best(name: str, seed: int, steps: int) -> tuple[dict[str, float], dict[str, int]]:
    """Return for each policy its seconds relative to the best split, up to the examples that all have done, and its
    changes.
    """
    case = scenario(name, WORKERS, steps, seed)

    def run(*hooks: Hooked) -> Simulation:
        return simulate(hooks, case.cluster, case.global_batch, steps, seed=seed)

    runs = {policy: run(*case.before, hooked(policy)) for policy in SPLITS}
    examples = min(int(r.global_batch.sum()) for r in runs.values())
    ours = runs["balance"]
    best = np.interp(examples, _from_zero(ours.global_batch), _from_zero(ours.ideal_seconds))
    over = {policy: r.seconds_to(examples) / best for policy, r in runs.items()}
    batches = runs[INFLATES].global_batch
    same = run(Hooked(ctrl.schedule(lambda step: int(batches[min(step, steps - 1)])), ()), hooked("balance"))
    over["same batches"] = same.total_seconds / runs[INFLATES].total_seconds
    return over, {policy: len(r.adjustments) for policy, r in runs.items()}


def _from_zero(values: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(values)])


def survey(seeds: int, steps: int) -> dict[str, tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """Return `over_best` by scenario, with an array over seeds for each policy.

    Leaves out scenarios that also decide the number of workers, where the split is not what matters most.
    """
    found = {}
    for name in names():
        if scenario(name, WORKERS).cluster.first is not None:
            continue
        over, changes = zip(
            *(over_best(name, seed, steps) for seed in range(FIRST_SEED, FIRST_SEED + seeds)), strict=True
        )
        found[name] = tuple({key: np.array([row[key] for row in rows]) for key in rows[0]} for rows in (over, changes))
    return found


def against(over: dict[str, np.ndarray], ours: str, published: list[str]) -> tuple[float, float, str]:
    """Compare `balance` with the published policy of the best median: return median and worst seed of the ratio, and
    its name.
    """
    best = min(published, key=lambda policy: float(np.median(over[policy])))
    ratio = over[ours] / over[best]
    return float(np.median(ratio)), float(ratio.max()), best


def table(found: dict) -> list[dict[str, str]]:
    """Return a row per scenario."""
    rows = []
    for name, (over, changes) in found.items():
        seconds_only, worst, _ = against(over, "balance", BLIND)
        everyone, _, best = against(over, "balance", PUBLISHED)
        rows.append(
            {
                "scenario": name,
                **{SHORT.get(p, p): f"{np.median(over[p]):.3f}" for p in ["equal", *PUBLISHED, INFLATES, "lb_bsp-arx"]},
                "balance": f"{np.median(over['balance']):.3f}",
                "changes": f"{np.median(changes['balance']):.0f}",
                "best published": best,
                "balance / best that reads times": f"{seconds_only:.3f} (≤ {worst:.3f})",
                "balance / best": f"{everyone:.3f}",
                "balance / prop.-published on its batches": f"{np.median(over['same batches']):.3f}",
            }
        )
    return rows


def main() -> None:
    """Measure and report."""
    args = command_line(__doc__, seeds=4, steps=600).parse_args()
    found = survey(args.seeds, args.steps)
    notes = [
        f"{WORKERS} workers, {args.steps} steps, {args.seeds} seeds, none of them used while constants were "
        f"chosen: medians, and in brackets the worst seed. "
        f"All policies decide at every step. `balance` reads the workers' seconds alone, `lb_bsp` free processor and "
        f"memory, too. "
        f"`{INFLATES}` lets the global batch grow, and is below 1 where a larger batch makes up for fixed costs: "
        f"the last column is `balance` on the same batches.",
    ]
    report("Every policy on every scenario", table(found), args.write, notes)


if __name__ == "__main__":
    main()
