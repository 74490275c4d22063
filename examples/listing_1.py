"""Listing 1 of KungFu's workshop paper, as a program: grow the batch with the gradient noise scale, and give slow
workers fewer examples.

    adaptive run -n 2 examples/listing_1.py      on scikit-learn's digits
    python examples/listing_1.py                 one worker, the same file
"""

import argparse
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--global-batch", type=int, default=64, help="examples per step over all workers, to begin with")
parser.add_argument("--explain", action="store_true", help="print the segments and messages of a step")
args = parser.parse_args()

world = comm.world()
show = functools.partial(print, flush=True) if world.rank == 0 else lambda *_: None
show(f"digits on {world.size} workers")

pixels, labels = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(pixels))
digits = {"image": (pixels / 16).astype(np.float32).reshape(-1, 8, 8, 1), "label": labels.astype(np.int32)}
train, test = ({key: rows[part] for key, rows in digits.items()} for part in np.split(order, [1437]))


class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, image):
        x = nn.relu(nn.Conv(32, (3, 3))(image))
        x = nn.relu(nn.Conv(64, (3, 3), strides=2)(x))
        x = nn.relu(nn.Conv(96, (3, 3), strides=2)(x))
        return nn.Dense(10)(x.reshape(len(x), -1))


net = ConvNet()
params = jax.jit(net.init)(jax.random.key(0), train["image"][:1])
state = TrainState.create(apply_fn=net.apply, params=params, tx=optax.adam(1e-3))


def loss_fn(params, batch):
    logits = net.apply(params, batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def accuracy(state, batch):
    return jnp.mean(net.apply(state.params, batch["image"]).argmax(-1) == batch["label"])


def adapt_batch_size(control, noise):  # plain Python, runs on every worker after a step
    control.barrier()
    control.rescale(global_batch=min(noise.scale, 1024))
    control.barrier()


def driver(state, batch):  # plain JAX
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    avg_grads = comm.all_reduce(grads)  # mean over examples, not mean of means
    noise = mon.noise_scale(grads, avg_grads)  # adds 12 bytes to the gradients' message
    seconds = comm.all_gather(mon.compute_seconds())
    ctrl.hook(adapt_batch_size, noise, every=20)
    ctrl.hook(ctrl.balance(), seconds, every=10)
    state = state.apply_gradients(grads=avg_grads)
    return state, {"loss": comm.all_reduce(loss), "noise": noise.scale}


with world:
    program = ad.Program(driver, state, train, global_batch=args.global_batch, world=world)
    if args.explain:
        show(program.explain(), "\n")

    went_through = [program.batch_sizes]
    for report in program.run(epochs=args.epochs, progress=True):
        if report.batch_sizes != went_through[-1]:
            went_through.append(report.batch_sizes)

    correct = program.evaluate(accuracy, test)
    show(f"\ntest accuracy  {correct:.2%}")
    show(f"batch sizes    {' → '.join('+'.join(map(str, sizes)) for sizes in went_through)}")
    show(f"noise scale    {float(report.metrics['noise']):.0f} examples")
    show(f"messages       {report.messages} a step, {report.message_bytes / 1e3:.0f} kB")
    show(
        f"kernels        {report.kernels} compiled in {report.compile_seconds:.1f} s; "
        f"steps waited {report.waited_seconds:.1f} s for a compiler, all of it at the start"
    )
