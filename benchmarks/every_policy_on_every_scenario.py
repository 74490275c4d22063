"""The distance of each policy that splits a batch from the best split, on each simulated cluster.

    python benchmarks/every_policy_on_every_scenario.py            # about 6 minutes of one core
    python benchmarks/every_policy_on_every_scenario.py --seeds 1 --steps 300

Every splitting policy runs on every cluster of `adaptive simulate --list` whose workers are all present from the start
or join by themselves. Measured are the seconds until a number of examples is done, relative to the best split in
hindsight, which knows each step's speeds in advance but not its noise. One published policy also changes the global
batch: the more examples a step has, the less its fixed cost matters. So `balance` also runs on the batch sizes of that
policy. Further tables: changes in the steady state, the step after two adjustments to a step change of speed, and the
cost of each policy.
"""

import argparse
import time
from collections import defaultdict

import numpy as np
from _measure import RESULTS, alternate, report

import adaptive as ad
import controllers as ctrl
from controllers.simulate import Hooked, Simulation, names, scenario, simulate
from controllers.simulate._draw import BLUE, GREY, INK, new_figure
from controllers.simulate._line_up import LINE_UP, SPLITS, hooked

WORKERS = 8
FIRST_SEED = 7000  # lower ones were looked at while the constants of the model were chosen
INFLATES = "proportional-published"
PUBLISHED = [name for name in SPLITS if LINE_UP[name].published and name != INFLATES]
BLIND = [name for name in PUBLISHED if "cpu_available" not in LINE_UP[name].reads]
SIZES = (8, 64, 512, 4096)
SHORT = {
    "proportional-published": "prop.-published",
    "proportional-no-drop": "prop.-no-drop",
    "leader_straggler": "leader_strag.",
    "lb_bsp-memoryless": "lb_bsp-last",
}


# --- every policy on every scenario -----------------------------------------------------------------------------------


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


# --- steady state, step changes, cost ---------------------------------------------------------------------------------


def _times(rng: np.random.Generator, n: int, fixed: float) -> ctrl.timing.BatchTime:
    return ctrl.timing.BatchTime(1 / rng.uniform(1e3, 3e3, n), rng.uniform(0, fixed, n))


def _over_ideal(times: ctrl.timing.BatchTime, sizes: np.ndarray) -> float:
    best = ctrl.timing.allocate(int(sizes.sum()), times, 1, int(sizes.sum()))
    return float(times(sizes).max() / times(best).max())


def steady(every: int, seeds: int) -> np.ndarray:
    """Return the changes in each hundred steps after the first hundred, at 5 % jitter."""
    counts = []
    for n in (2, 4, 8, 16):
        for seed in range(FIRST_SEED, FIRST_SEED + seeds):
            true = _times(np.random.default_rng([seed, n]), n, 0.02)
            run = simulate(
                ctrl.balance(), lambda _, b, t=true: t(b), [128] * n, 1100, every=every, jitter=0.05, seed=seed
            )
            counts.append(np.histogram(run.changes, np.arange(100, 1101, 100))[0])
    return np.array(counts)


def after_two(every: int, fixed: float, seeds: int) -> np.ndarray:
    """Return the step time relative to the best split, two adjustments after one worker's speed has changed."""
    ratios = []
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(2, 9))
        before = _times(rng, n, fixed)
        factor = np.where(np.arange(n) == rng.integers(n), rng.choice([0.5, 1.5, 2.0, 3.0]), 1.0)
        after = ctrl.timing.BatchTime(before.slope * factor, before.intercept * factor)
        change = int(rng.integers(200, 211))

        def times(step, sizes, before=before, after=after, change=change):
            return (before if step < change else after)(sizes)

        run = simulate(ctrl.balance(), times, [128] * n, 320, every=every, jitter=0.05, seed=seed)
        adjusted = [step for step in run.changes if step >= change]
        ratios.append(_over_ideal(after, run.sizes[min([*adjusted[2:], 320]) - 1]))
    return np.array(ratios)


def cost(n: int, rounds: int) -> dict[str, np.ndarray]:
    """Return the seconds of a due step of each policy in turn, on steady workers with 5 % jitter, from an equal split
    on.
    """
    rng = np.random.default_rng(0)
    true, names = _times(rng, n, 0.02), [name for name in SPLITS if name != "equal"]
    hooks = {name: hooked(name) for name in names}
    states = {name: hook.policy.init(n) for name, hook in hooks.items()}
    sizes = dict.fromkeys(names, (128,) * n)
    before, at = dict(sizes), defaultdict(int)

    def step(name: str) -> None:
        at[name] += 1
        given = {
            "seconds": true(np.array(before[name])) * jitter[at[name] % len(jitter)],
            "cpu_available": np.ones(n),
            "memory_available": np.full(n, 1e9),
            "capacities": 1 / true.slope,
        }
        observation = ad.Observation(
            step=at[name],
            epoch=0.0,
            values=tuple(given[read] for read in hooks[name].reads),
            batch_sizes=sizes[name],
            previous_batch_sizes=before[name],
            global_batch=128 * n,
            limits=limits,
            due=True,
        )
        start = time.perf_counter()
        decision, states[name] = hooks[name].policy.update(observation, states[name])
        spent[name].append(time.perf_counter() - start)
        before[name] = sizes[name]
        if decision is not None and decision.shares is not None:
            sizes[name] = tuple(int(share) for share in decision.shares)

    limits = ad.Limits((1,) * n, (10**6,) * n, 1)
    jitter = 1 + 0.05 * np.clip(rng.standard_normal((64, n)), -3, 3)
    spent: dict[str, list[float]] = defaultdict(list)
    alternate({name: lambda name=name: step(name) for name in names}, rounds, warmup=rounds // 3)
    return {name: np.array(values[rounds // 3 :]) for name, values in spent.items()}


# --- results ----------------------------------------------------------------------------------------------------------


def draw(found: dict) -> None:
    """Draw a heat map of each policy's distance from the best split on each scenario."""
    from matplotlib.colors import LinearSegmentedColormap

    columns = ["equal", *PUBLISHED, INFLATES, "lb_bsp-arx", "balance", "balance-machine"]
    values = np.array([[np.median(over[c]) for c in columns] for over, _ in found.values()])
    figure = new_figure(10.5, 0.8 + 0.29 * len(found))
    axes = figure.subplots()
    shown = np.log(np.clip(values, 1.0, 2.0))
    axes.imshow(shown, cmap=LinearSegmentedColormap.from_list("paper to blue", ["white", BLUE]), aspect="auto")
    for (i, j), value in np.ndenumerate(values):
        least = min(row for row in values[i]) + 5e-4
        axes.text(
            j,
            i,
            f"{value:.3f}" if value < 1.9995 else f"{value:.2f}",
            ha="center",
            va="center",
            fontsize=8,
            color="white" if value > 1.45 else INK,
            fontweight="bold" if value <= least else "normal",
        )
    axes.set_xticks(range(len(columns)), [SHORT.get(c, c) for c in columns], fontsize=8)
    axes.set_yticks(range(len(found)), list(found), fontsize=8)
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.spines[:].set_visible(False)
    axes.axvline(len(columns) - 2.5, color=GREY)
    axes.set_xlabel(
        "seconds to as many examples, over the best split in hindsight (median of seeds); bold: least", fontsize=8
    )
    figure.savefig(RESULTS / "every_policy_on_every_scenario.png", dpi=110)


def table(found: dict) -> list[dict[str, str]]:
    """Return a row per scenario."""
    rows = []
    for name, (over, changes) in found.items():
        seconds_only, worst, _ = against(over, "balance", BLIND)
        everyone, _, best = against(over, "balance", PUBLISHED)
        machine, machine_worst, _ = against(over, "balance-machine", PUBLISHED)
        rows.append(
            {
                "scenario": name,
                **{SHORT.get(p, p): f"{np.median(over[p]):.3f}" for p in ["equal", *PUBLISHED, INFLATES, "lb_bsp-arx"]},
                "balance": f"{np.median(over['balance']):.3f}",
                "balance-machine": f"{np.median(over['balance-machine']):.3f}",
                "changes": f"{np.median(changes['balance']):.0f}",
                "best published": best,
                "balance / best that reads times": f"{seconds_only:.3f} (≤ {worst:.3f})",
                "balance / best": f"{everyone:.3f}",
                "balance-machine / best": f"{machine:.3f} (≤ {machine_worst:.3f})",
                "balance / prop.-published on its batches": f"{np.median(over['same batches']):.3f}",
            }
        )
    return rows


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args()
    found = survey(options.seeds, options.steps)
    draw(found)
    calm = {every: steady(every, options.seeds) for every in (1, 10)}
    changed = {(e, fixed): after_two(e, fixed, 12 * options.seeds) for e in (1, 10) for fixed in (0.0, 0.01, 0.05)}
    costs = {n: cost(n, 90 if n < 1000 else 30) for n in SIZES}
    lines = [
        "![Every policy on every scenario](every_policy_on_every_scenario.png)",
        f"{WORKERS} workers, {options.steps} steps, {options.seeds} seeds, none of them used while constants were "
        f"chosen: medians, and in brackets the worst seed. "
        f"All policies decide at every step. `balance` reads the workers' seconds alone; `balance-machine` is "
        f"`balance(stretch_seconds=0, predictor=arx(), n_inputs=2)`, which reads free "
        f"processor and memory too, as `lb_bsp` does. "
        f"`{INFLATES}` lets the global batch grow, and is below 1 where a larger batch makes up for fixed costs: "
        f"the last column is `balance` on the same batches.",
        "Steady workers, 5 % jitter, 2 to 16 workers: "
        + "; ".join(
            f"deciding every {e}: {c.mean():.2f} changes in 100 steps, {100 * (c <= 1).mean():.1f} % of the hundreds "
            f"have at most one, at most {c.max()}"
            for e, c in calm.items()
        )
        + ".",
        "Two adjustments after a step change of one worker's speed (0.5 to 3 times), step over the best split's, "
        f"{12 * options.seeds} seeds: "
        + "; ".join(
            f"every {e}, fixed cost ≤ {1e3 * fixed:.0f} ms: median {np.median(r):.3f}, p90 {np.quantile(r, 0.9):.3f}, "
            f"worst {r.max():.3f}"
            for (e, fixed), r in changed.items()
        )
        + ".",
        "Microseconds of a step, deciding at each (median; in brackets the 90th percentile):\n\n"
        + "\n".join(
            [
                "| policy | " + " | ".join(f"{n} workers" for n in SIZES) + " |",
                "| --- |" + " ---: |" * len(SIZES),
                *(
                    f"| {name} | "
                    + " | ".join(
                        f"{1e6 * np.median(costs[n][name]):.0f} ({1e6 * np.quantile(costs[n][name], 0.9):.0f})"
                        for n in SIZES
                    )
                    + " |"
                    for name in costs[SIZES[0]]
                ),
            ]
        ),
    ]
    report("Every policy on every scenario", table(found), "every_policy_on_every_scenario.md", lines)


if __name__ == "__main__":
    main()
