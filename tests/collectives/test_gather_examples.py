"""`gather_examples`: a contrastive loss has the value and the gradient of the whole batch, on any split."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import monitors as mon
from adaptive.operators.context import trace_as
from adaptive.runtime.local_world import LocalWorld

EXAMPLES, FEATURES = 12, 3
HERE = r"\(test_gather_examples.py:\d+\)"


def make_data() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    image, text = rng.normal(size=(2, EXAMPLES, 4))
    return {"image": image, "text": text, "id": np.arange(EXAMPLES, dtype=np.int32)}


def start() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {"image": rng.normal(size=(4, FEATURES)), "text": rng.normal(size=(4, FEATURES)), "scale": np.float64(0.7)}


def clip_loss(params, batch, gather):
    """As of Radford et al. 2021; `gather` returns the rows of all examples."""
    image, text = (batch[name] @ params[name] for name in ("image", "text"))
    images, texts = gather((image, text))
    own = (image * text).sum(-1)
    by_image = jax.nn.logsumexp(params["scale"] * image @ texts.T, -1) - params["scale"] * own
    by_text = jax.nn.logsumexp(params["scale"] * text @ images.T, -1) - params["scale"] * own
    return (by_image + by_text).mean() / 2


def of_all(rows):
    return comm.gather_examples(rows, size=EXAMPLES)


def clip_driver(params, batch):
    loss, grads = comm.all_reduce(jax.value_and_grad(clip_loss)(params, batch, of_all))
    return params, {"loss": loss, "grads": grads, "ids": comm.gather_examples(batch["id"], EXAMPLES)}


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (lambda: LocalWorld(3), {"shares": [5, 1, 6], "microbatch": 2}),
        (lambda: LocalWorld(3), {"shares": [0, 5, 7]}),
        (lambda: comm.DeviceWorld(jax.local_devices()[:2]), {"shares": [5, 7]}),
        (comm.SoloWorld, {}),
    ],
    ids=["microbatches", "a worker without examples", "devices", "one worker"],
)
def test_value_and_gradient_are_those_of_the_whole_batch(world, options, double_precision):
    options = {"resizable": False, **options}
    with (
        world() as where,
        ad.Program(clip_driver, start(), make_data(), global_batch=EXAMPLES, world=where, **options) as p,
    ):
        found = p.step().metrics
    np.testing.assert_array_equal(np.sort(found["ids"]), np.arange(EXAMPLES))
    loss, grads = jax.value_and_grad(clip_loss)(start(), make_data(), lambda rows: rows)
    np.testing.assert_allclose(found["loss"], loss, rtol=0, atol=1e-12)
    for name, grad in grads.items():
        np.testing.assert_allclose(found["grads"][name], grad, rtol=0, atol=1e-12)


def test_half_precision_keeps_its_type():
    def driver(w, batch):
        def loss_fn(w):
            return (comm.gather_examples(batch["x"] * w, 4) ** 2).mean()

        return w, {"grad": comm.all_reduce(jax.grad(loss_fn)(w))}

    data = {"x": np.arange(1, 5).astype(jnp.bfloat16)}
    with ad.Program(driver, jnp.bfloat16(2), data, global_batch=4, world=LocalWorld(2), shares=[1, 3]) as program:
        grad = program.step().metrics["grad"]
    assert grad.dtype == jnp.bfloat16
    assert float(grad) == pytest.approx(30, rel=2e-2)  # of w^2 (1 + 4 + 9 + 16) / 4, at 2


@pytest.fixture(scope="module")
def program():
    data = jax.tree.map(lambda a: a if a.dtype == np.int32 else a.astype(np.float32), make_data())
    state = jax.tree.map(np.float32, start())
    options = {"global_batch": EXAMPLES, "world": LocalWorld(2), "deterministic": True}
    with ad.Program(clip_driver, state, data, **options) as program:
        yield program


def test_the_split_may_change_but_not_the_global_batch(program):
    losses = []
    for shares in ([1, 1], [1, 5]):
        program.rescale(shares=shares)
        losses.append(program.step().metrics["loss"])  # all examples, in another order
    assert program.batch_sizes == (2, 10)
    np.testing.assert_allclose(*losses, rtol=1e-5)
    program.rescale(global_batch=8)
    with pytest.raises(
        ad.BatchSizeError, match=rf"gather_examples\(size=12\) {HERE}: this step has 8 .*global_batch=12"
    ):
        program.step()
    program.rescale(global_batch=EXAMPLES)
    program.step()


def test_coupled_gradients_have_no_noise_scale():
    def driver(params, batch):
        grads = jax.grad(clip_loss)(params, batch, of_all)
        return params, {"noise": mon.noise_scale(grads, comm.all_reduce(grads)).scale}

    data, state = (jax.tree.map(jnp.asarray, of) for of in (make_data(), start()))
    with pytest.raises(ad.CollectiveError, match="coupled"):
        ad.Program(driver, state, data, global_batch=EXAMPLES, world=LocalWorld(2))


def test_outside_a_program_one_worker_has_all_rows():
    rows = jnp.arange(6.0).reshape(3, 2)
    np.testing.assert_array_equal(comm.gather_examples(rows, 3), rows)
    grad = jax.grad(lambda x: (comm.gather_examples(x, 3) ** 2).sum())(rows)
    np.testing.assert_allclose(grad, 2 * rows)
    with LocalWorld(2), pytest.raises(ad.CollectiveError, match="the order of the examples is unknown"):
        comm.gather_examples(rows, 3)


def test_a_kernel_may_be_for_more_examples_than_a_step_has():
    with trace_as(capacity=1, examples=4):
        rows, transposed = jax.vjp(lambda x: comm.gather_examples(x, 3), jnp.ones((4, 2)))
        assert rows.shape == (3, 2)
        np.testing.assert_array_equal(transposed(jnp.ones((3, 2)))[0][3], 0)


@pytest.mark.parametrize(
    ("value", "size", "error", "says"),
    [
        (np.ones((4, 2)), 0, ad.BatchSizeError, "size= is the global batch, 1 or more; got 0"),
        (np.ones((4, 2)), 1.5, ad.BatchSizeError, "got 1.5"),
        (np.ones((3, 2)), 8, ad.CollectiveError, r"\['x'\] has shape \(3, 2\); it must have 4 rows"),
        (np.float32(1), 8, ad.CollectiveError, r"has shape \(\); it must have 4 rows"),
        (np.ones(4, bool), 8, ad.CollectiveError, r"boolean.*astype"),
    ],
)
def test_what_is_not_a_row_for_each_example_is_refused(value, size, error, says):
    with trace_as(capacity=2, examples=4), pytest.raises(error, match=rf"(?s)gather_examples ?{HERE}: .*{says}"):
        comm.gather_examples({"x": value}, size)
