"""A worker joins from the reserve within 100 ms and leaves within a step, and the other workers compile nothing.

While it joins, the others' steps take at most 1.3 times as long.

    python benchmarks/join_and_leave.py [--changes 20] [--jobs 2]

Of three ranks two train a small net (steps of some 5 ms on a core of their own, with the noise scale and balancing).
Every 40 steps `rescale(workers=…)` has the third join or leave, with a state of 1.6 MB and with one of 100 MB.

"Meanwhile" is a step between the request and the change, relative to the median of the 20 steps before the request.
"The switch" is the step in which the members change, less the median of the 20 steps after it, on the slower of the two
remaining workers. Parts of the switch: the rendezvous and the transfer of the state. `--rank` runs the part of each
rank.
"""

from __future__ import annotations

import os
from collections import defaultdict
from itertools import pairwise
from typing import Any

import numpy as np
from _elastic import Notes, job, monitored
from _measure import Spread, command_line, readable, report

RANKS, FEW, MANY, BETWEEN = 3, 2, 3, 40
JOIN, LEAVE = "a join", "a leave"
STATES = {"1.6 MB": 0, "100 MB": 96}  # and what of it lies beside the net's, in MiB


def rank(folder: str, changes: int, mebibytes: int) -> None:
    """Train on this rank, and request another number of workers at intervals."""
    import collectives as comm
    from adaptive.control.membership import Membership
    from adaptive.program.members import Members

    notes = Notes(folder)
    notes.around(Membership, "change")
    notes.around(Members, "transfer_state")
    with comm.world(workers=FEW) as world:
        program = monitored(world, workers=FEW, mebibytes=mebibytes)
        program.warm_up()
        for step in program.run(steps=BETWEEN * (changes + 2)):
            there = len(step.members)
            notes.take("step", step=step.step, seconds=step.seconds, workers=there, kernels=step.kernels)
            if step.step % BETWEEN == 0 and step.step // BETWEEN <= changes:
                program.rescale(workers=MANY if there == FEW else FEW)


def changes_of(notes: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return each change of a job as the remaining workers recorded it, without those in the first `BETWEEN` steps."""
    seen: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for lines in notes:
        steps = [line for line in lines if line["kind"] == "step"]
        for i, (before, step) in enumerate(pairwise(steps)):
            if step["workers"] != before["workers"] and before["step"] + 1 == step["step"] and i > 20:
                seen[step["step"]].append(_change(lines, steps[max(0, i - 60) : i + 1], steps[i + 1 : i + 22]))
    return [_slower(those) for those in seen.values() if len(those) >= FEW]


def _change(lines: list[dict], before: list[dict], behind: list[dict]) -> dict[str, Any]:
    change = behind[0]
    asked = (change["step"] - 1) // BETWEEN * BETWEEN
    usual = np.median([step["seconds"] for step in before if asked - 20 < step["step"] <= asked])
    inside = [line for line in lines if change["t"] - change["seconds"] < line["t"] < change["t"]]
    return {
        "what": JOIN if change["workers"] == MANY else LEAVE,
        "meanwhile": [step["seconds"] / usual for step in before if step["step"] > asked],
        "switch": change["seconds"] - float(np.median([step["seconds"] for step in behind[1:]])),
        "step": float(np.median([step["seconds"] for step in behind[1:]])),
        "together": sum(line["seconds"] for line in inside if line["kind"] == "change"),
        "handed over": sum(line["seconds"] for line in inside if line["kind"] == "transfer_state"),
        "kernels": behind[-1]["kernels"] - before[-1]["kernels"],
    }


def _slower(those: list[dict[str, Any]]) -> dict[str, Any]:
    return {**max(those, key=lambda change: change["switch"]), "kernels": sum(change["kernels"] for change in those)}


def row(state: str, what: str, changes: list[dict[str, Any]]) -> dict[str, object]:
    def median(name: str) -> str:
        return readable(float(np.median([change[name] for change in changes])))

    switch = [change["switch"] for change in changes]
    spread = Spread.of(switch)
    meanwhile = [ratio for change in changes for ratio in change["meanwhile"]]
    return {
        "what": what,
        "state": state,
        "times": len(changes),
        "the switch": readable(spread.median),
        "p90": readable(spread.p90),
        "worst": readable(max(switch)),
        "together": median("together"),
        "handed over": median("handed over"),
        "a step": median("step"),
        "meanwhile": f"{np.median(meanwhile):.2f} (p90 {np.percentile(meanwhile, 90):.2f})" if meanwhile else "",
        "steps meanwhile": f"{len(meanwhile) / len(changes):.1f}",
        "compiled": sum(change["kernels"] for change in changes),
    }


def main() -> None:
    args = command_line(
        __doc__, rank=None, changes=(20, "in a job"), mebibytes=0, jobs=(2, "for each size of state")
    ).parse_args()
    if args.rank:
        rank(args.rank, args.changes, args.mebibytes)
        return
    found: dict[str, list[dict[str, Any]]] = {state: [] for state in STATES}
    load = []
    for _ in range(args.jobs):
        for state, mebibytes in STATES.items():
            with job(RANKS, __file__, ["--changes", args.changes, "--mebibytes", mebibytes]) as running:
                found[state] += changes_of(running.finished())
            load.append(os.getloadavg()[0])
    rows = [
        row(state, what, [change for change in changes if change["what"] == what])
        for state, changes in found.items()
        for what in (JOIN, LEAVE)
    ]
    notes = [
        f"Three ranks and a launcher share {os.cpu_count()} cores, so a step of three workers takes longer than one on "
        "cores of their own. Compiled: kernels on those who were there, from the last step before to 20 steps behind "
        "the change.",
        f"Load averages at the ends of jobs: {min(load):.0f} to {max(load):.0f}.",
    ]
    report("What a joining or leaving worker costs the others", rows, args.write, notes)


if __name__ == "__main__":
    main()
