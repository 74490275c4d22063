"""JAX on four CPU devices, and strict where flax and optax allow it; Hypothesis draws alike every time."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

# Environment, so that it holds for the processes that tests start too.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
from tests import compilations, speed

if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # most time goes into compiling the same few programs
    os.environ.update(compilations.cache())
os.environ.setdefault("PYTEST_TIMEOUT", f"{speed.last_resort():.0f}")  # of a test; pytest-timeout reads it

import hypothesis
import jax
import pytest
from hypothesis.internal.conjecture import providers

from adaptive.base.process.signals import Interrupts
from adaptive.runtime.kernels import Kernels
from adaptive.runtime.kernels.background_compiler import BackgroundCompiler
from adaptive.runtime.kernels.compiled import CompiledKernels
from tests import cost, jaxrun, ranks
from tests.mpirun import STARTED, mpirun_version

if STARTED in os.environ:  # temporary folders of its own: pytest deletes old ones, also where another rank is doing so
    os.environ["PYTEST_DEBUG_TEMPROOT"] = _folders = tempfile.mkdtemp(prefix="adaptive-tests-")
    atexit.register(shutil.rmtree, _folders, ignore_errors=True)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells do in the background; tests interrupt steps
    signal.signal(signal.SIGINT, signal.default_int_handler)
compilations.share_contexts()
jax.config.update("jax_num_cpu_devices", 4)  # before any backend is used: workers of a DeviceWorld
jaxrun.join()  # where one of its processes runs this suite
# A sum of (n,) and (n, 1) is most often a bug, and so is one of an int and a float. What optax and flax compute inside
# is promoted by the usual rules: see tests/relaxed.py.
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# No deadline: the first example often compiles something.
hypothesis.settings.register_profile("suite", derandomize=True, deadline=None)
hypothesis.settings.load_profile("suite")
# Hypothesis also draws constants of the modules that are imported by then, and reads all their sources for that.
providers._get_local_constants = lambda: providers._local_constants


def _set_the_compilers_speed(speed: str) -> None:
    """No test may depend on when kernels are ready in the background. With TESTS_COMPILER=quick they are as soon as
    they are asked for, with TESTS_COMPILER=slow long after.
    """
    background, compile_kernel = BackgroundCompiler, CompiledKernels.compile

    def slow(self, local, size):
        if threading.current_thread().name == "adaptive-compiler":
            time.sleep(0.5)
        compile_kernel(self, local, size)

    def quick(asking):
        def asked(self, *args):
            asking(self, *args)
            if isinstance(self._compiler, background):
                self._compiler.finish()

        return asked

    if speed == "slow":
        CompiledKernels.compile = slow
    else:
        Kernels.extend, Kernels.ask = quick(Kernels.extend), quick(Kernels.ask)


if os.environ.get("TESTS_COMPILER"):
    _set_the_compilers_speed(os.environ["TESTS_COMPILER"])


def pytest_configure(config: pytest.Config) -> None:
    ranks.register(config)
    cost.register(config)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest goes first, so that no process is left with it when the others have done."""
    items.sort(key=lambda item: item.get_closest_marker("ranks") is None)


def pytest_collection_finish() -> None:
    """Collect garbage seldom: traces make so many objects that looking for cycles took a fifth of the suite's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.fixture(autouse=True, scope="module")
def _collect_only_what_a_module_leaves() -> Iterator[None]:
    """Exempt what survives a module from later collections.

    JAX's caches grow to gigabytes in the suite, and a look at all of them takes some ten seconds.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _ctrl_c_is_not_deferred() -> Iterator[None]:
    """A step defers Ctrl-C. If something else takes steps and does not end that, the next Ctrl-C does nothing."""
    yield
    handler = signal.getsignal(signal.SIGINT)
    assert not isinstance(getattr(handler, "__self__", None), Interrupts), "Ctrl-C is still deferred after this test"


def pytest_report_header() -> list[str]:
    names = ("jax", "jaxlib", "flax", "optax", "numpy", "mpi4py")
    return [", ".join(f"{name} {_version(name)}" for name in names), f"mpirun: {mpirun_version()}"]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"
