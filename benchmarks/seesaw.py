"""A batch that grows where a cosine lowers the learning rate reaches the cosine's loss in fewer steps.

    python benchmarks/seesaw.py --write              # about 10 minutes, one process

A transformer of two blocks learns Python's documentation, character by character, with AdamW. The reference is a warmup
over a tenth of the examples and a cosine to zero, at a fixed batch of 32 windows. The same schedule also runs with a
batch that doubles when the rate has halved, as in Seesaw (Meterez et al. 2025), from 32 windows to 128, once with only
the learning rate following the batch (`scale_by_batch`), and once with all parameters of AdamW (`scale_adamw`). All see
the same number of examples. Reported is the loss on held-out text over three seeds of weights and order. (Aimed at, as
in the paper: within 0.5 % of the cosine's loss, in at most 0.70 of its steps.)
"""

from __future__ import annotations

import jax
import numpy as np
import optax
from _language_model import CONTEXT, init, loss_fn, text
from _measure import command_line, report

import adaptive as ad
import collectives as comm
import controllers as ctrl

BASE, LARGEST, PEAK = 32, 128, 4e-3


def trained(kind: str, seed: int, steps: int) -> tuple[float, int]:
    """Train on `steps * BASE` examples, and return the loss on the test text and the number of steps."""
    train, test, n_characters = text()
    examples = steps * BASE
    schedule = optax.warmup_cosine_decay_schedule(0, PEAK, examples // 10, examples)

    def batch_size(seen: float) -> int:
        decay = PEAK / max(float(schedule(seen)), 1e-9) if seen > examples // 10 else 1.0
        return min(BASE * 2 ** int(np.log2(decay) + 1e-9), LARGEST)

    policies = {
        "cosine": ctrl.schedule(by="examples", lr=schedule),
        "seesaw": ctrl.schedule(batch_size, by="examples", lr=schedule),
    }
    policies["complete"] = policies["seesaw"]

    def optimizer(lr: jax.Array | float) -> optax.GradientTransformation:
        if kind == "complete":
            scaled = ctrl.scale_adamw(lr, base=BASE, weight_decay=0.01)
        else:
            scaled = optax.chain(optax.adamw(lr, weight_decay=0.01), ctrl.scale_by_batch("sqrt", base=BASE))
        return optax.chain(optax.clip_by_global_norm(1.0), scaled)

    def driver(state: tuple, batch: dict) -> tuple:
        params, opt_state = state
        grads = comm.all_reduce(jax.grad(loss_fn)(params, batch))
        lr = ad.hyperparameter("lr", PEAK / examples)  # 0 would never start
        updates, opt_state = optimizer(lr).update(grads, opt_state, params)
        ctrl.hook(policies[kind], every=5)
        return (optax.apply_updates(params, updates), opt_state), {}

    params = init(seed, n_characters)
    state = params, optimizer(PEAK).init(params)
    with ad.Program(driver, state, train, global_batch=BASE, seed=seed) as program:
        for done in program.run():
            if done.examples >= examples:
                break
        return float(program.evaluate(lambda state, batch: loss_fn(state[0], batch), test)), program.steps


def main() -> None:
    """Measure and report."""
    args = command_line(__doc__, seeds=3, steps=(700, "of the fixed batch")).parse_args()
    rows = []
    for seed in range(args.seeds):
        kinds = "cosine", "seesaw", "complete"
        (cosine, steps), (seesaw, fewer), (complete, _) = (trained(kind, seed, args.steps) for kind in kinds)
        rows.append(
            {
                "seed": seed,
                "loss, cosine": f"{cosine:.4f}",
                "loss, seesaw": f"{seesaw:.4f}",
                "ratio of losses": f"{seesaw / cosine:.4f}",
                "loss, seesaw with scale_adamw": f"{complete:.4f}",
                "its ratio": f"{complete / cosine:.4f}",
                "steps, cosine": steps,
                "steps, seesaw": fewer,
                "ratio of steps": f"{fewer / steps:.3f}",
            }
        )
    notes = [
        f"Batch {BASE} fixed against {BASE} to {LARGEST}, AdamW with a peak of {PEAK}, {args.steps * BASE:,} windows "
        f"of {CONTEXT} characters; losses in nats a character on the last tenth of the text. Steps, not seconds: the "
        "seconds of a step of four times the batch are the machine's."
    ]
    report("The same loss in fewer steps", rows, args.write, notes)


if __name__ == "__main__":
    main()
