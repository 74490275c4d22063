"""What a hook function gets: the step it stands behind, and the requests it can make."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from adaptive import AdaptiveError, BatchSizeError, DriverError, WorkerCountError
from adaptive.extend import Decision, Observation, brief, check_shares, checked_hyperparameters, real

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


class Control:
    """A hook's hand on the program: `Listing 1` of Mai et al. 2019.

    The requests of one hook are collected; they take effect between this step and the next, on all workers at once. A
    later request overrides an earlier one for the same thing. What is read here is replicated.

    Attributes are for reading only; a `Control` is of no use once its hook has returned.
    """

    def __init__(self, observation: Observation, name: str = "hook", where: str = "") -> None:
        self._observation = observation
        self._name = name
        self._where = where
        self._global_batch: int | None = None
        self._shares: tuple[float, ...] | None = None
        self._workers: int | None = None
        self._values: dict[str, Any] = {}
        self._stop = False
        self._closed = False

    @property
    def step(self) -> int:
        """Steps done, this one included."""
        return self._observation.step

    @property
    def epoch(self) -> float:
        """Epochs of data consumed, as a fraction."""
        return self._observation.epoch

    @property
    def workers(self) -> int:
        """The number of members: how many workers there are now."""
        return len(self._observation.members)

    @property
    def capacity(self) -> int:
        """The number of seats: how many workers there can be. `batch_sizes` and shares have a place for each."""
        return len(self._observation.batch_sizes)

    @property
    def target_workers(self) -> int:
        """How many members there are to be, as asked for so far: by earlier hooks, and by this one."""
        seen = self._observation
        return (
            seen.target_workers
            if self._workers is None
            else min(max(self._workers, seen.least_workers), seen.most_workers)
        )

    @property
    def most_workers(self) -> int:
        """How many members there can be now: those there are, and those in reserve."""
        return self._observation.most_workers

    @property
    def members(self) -> tuple[int, ...]:
        """The seats with a worker on them."""
        return self._observation.members

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Examples per worker in this step."""
        return self._observation.batch_sizes

    @property
    def global_batch(self) -> int:
        """Examples over all workers in the next step, as asked for so far: by earlier hooks, and by this one."""
        asked = self._global_batch
        return self._observation.global_batch if asked is None else self._observation.limits.nearest(asked)

    def barrier(self) -> None:
        """Mark where all workers have arrived, as the paper's listing does.

        It costs nothing and sends nothing. A hook runs after the step's message, which no worker passes before all
        have sent their part: every worker is already at the barrier when its hook starts. And nothing that a hook
        asks for happens before the next step starts, which is the second barrier of the listing.

        Raises:
          AdaptiveError: the hook has returned, and its barrier is past.
        """
        self._check_open("barrier()")

    def rescale(
        self,
        global_batch: ArrayLike | None = None,
        shares: ArrayLike | Sequence[float] | None = None,
        workers: ArrayLike | None = None,
    ) -> None:
        """Ask for another global batch, another split of it over the workers, another number of workers, or several of
        these.

        Args:
          global_batch: examples per step over all workers, rounded to an integer. Less than one example per worker, or
            more than all workers may hold, is clipped by the program, with a note in the report.
          shares: relative weights, one per seat (`capacity`). Integers that sum to the global batch are taken
            exactly. A worker whose share is 0 takes no examples, until a later request gives it some; another takes at
            least one.
          workers: how many members there are to be, rounded to an integer: KungFu's `rescale(n_peers)`. More than can
            be had, or fewer than have to stay, is clipped by the program, with a note. The highest seats leave before
            the next step; whoever is missing gets ready beside the steps. The global batch stays unless it is asked
            for, too: what of it the workers cannot hold yet is taken when those who were asked for are there.

        Raises:
          BatchSizeError: a request that cannot be meant: NaN, infinite, negative, not one number; shares of another
            number than there are seats, or all zero.
          WorkerCountError: a number of workers that cannot be meant; 0 is one.
        """
        self._check_open("rescale()")
        if global_batch is None and shares is None and workers is None:
            self._refuse("rescale()", "none of global_batch=, shares= and workers= is given.")
        if workers is not None:
            self._workers = self._check_workers(workers)
        if global_batch is not None:
            self._global_batch = round(self._check_global_batch(global_batch))
        if shares is not None:
            self._shares = self._check_shares(shares)

    @property
    def hyperparameters(self) -> Mapping[str, Any]:
        """The driver's `ad.hyperparameter`s in the next step, by name, as asked for so far."""
        return {**self._observation.hyperparameters, **self._values}

    def set(self, **values: ArrayLike) -> None:
        """Ask for other values of the driver's hyperparameters: `control.set(lr=0.05)`. They are in force from the next
        step on; nothing is compiled for it.

        Args:
          **values: by name; of the shape and the type that each has.

        Raises:
          DriverError: the driver has no `ad.hyperparameter` of this name, or it cannot be of this value.
        """
        self._check_open("set()")
        try:
            seen = self._observation
            self._values |= checked_hyperparameters(seen.hyperparameters, values, seen.hyperparameter_types)
        except DriverError as error:
            raise DriverError(f"hook {self._name!r}{self._where}, step {self.step}: {error}") from None

    def stop(self) -> None:
        """End the run after this step."""
        self._check_open("stop()")
        self._stop = True

    def close(self, notes: Sequence[str] = ()) -> Decision | None:
        """Called when the hook has returned: what it asked for, or None."""
        self._closed = True
        asked = self._global_batch, self._shares, self._stop, tuple(notes), self._workers, self._values
        decision = Decision(*asked)
        return decision if decision or decision.notes else None

    def _check_global_batch(self, value: ArrayLike) -> float:
        request = "rescale(global_batch=…)"
        number = real(value)
        if number is None:
            fields = getattr(value, "_fields", ())
            advice = f" Give one of its fields: {', '.join(fields)}." if fields else ""
            kind = f"an array of shape {np.shape(value)}" if np.shape(value) and not fields else f"{value!r}"
            self._refuse(request, f"the global batch is one number; got {kind}.{advice}")
        request = f"rescale(global_batch={number:g})"
        if np.isinf(number) and isinstance(value, numbers.Integral):
            self._refuse(f"rescale(global_batch={brief(value)})", "more than can be meant.")
        if np.isnan(number):
            self._refuse(
                request,
                "not a number. A noise scale is NaN until enough steps have been seen to tell it. "
                "Ask once it is known:\n"
                "    if np.isfinite(noise.scale):\n"
                "        control.rescale(global_batch=noise.scale)\n"
                "or leave it to a policy that waits until then:  ctrl.hook(ctrl.noise_batch(), noise)",
            )
        if np.isinf(number):
            self._refuse(
                request,
                "infinite. A noise scale is infinite where the gradient cannot be told from its noise. Bound it:\n"
                "    control.rescale(global_batch=min(noise.scale, 4096))\n"
                "or use a policy that has bounds:  ctrl.hook(ctrl.noise_batch(max_batch=4096), noise)",
            )
        if number < 0:
            self._refuse(request, "a global batch cannot be negative.")
        return number

    def _check_workers(self, value: ArrayLike) -> int:
        try:
            return checked_workers(value)
        except WorkerCountError as error:
            raise WorkerCountError(f"hook {self._name!r}{self._where}, step {self.step}: {error}") from None

    def _check_shares(self, value: Any) -> tuple[float, ...]:
        try:
            return tuple(check_shares(value, self.capacity).tolist())
        except BatchSizeError as error:
            self._refuse("rescale(shares=…)", str(error))

    def _check_open(self, request: str) -> None:
        if self._closed:
            raise AdaptiveError(
                f"hook {self._name!r}{self._where}: {request} after the hook has returned. Requests are collected "
                f"while it runs, after step {self.step}; keep what you need to know, not the control."
            )

    def _refuse(self, request: str, why: str) -> NoReturn:
        raise BatchSizeError(f"hook {self._name!r}{self._where}, step {self.step}: {request}: {why}")


def checked_workers(value: ArrayLike) -> int:
    """A number of workers as it is asked for: rounded, and one at least.

    Raises:
      WorkerCountError: it cannot be meant.
    """
    number = real(value)
    if number is None:
        kind = f"an array of shape {np.shape(value)}" if np.shape(value) else f"{value!r}"
        raise WorkerCountError(f"rescale(workers=…): the number of workers is one number; got {kind}.")
    request = f"rescale(workers={number:g})"
    if np.isnan(number):
        raise WorkerCountError(
            f"{request}: not a number. A noise scale is NaN until enough steps have been seen to tell it. Ask once it "
            "is known:\n"
            "    if np.isfinite(noise.scale):\n"
            "        control.rescale(workers=noise.scale / batch_per_worker)"
        )
    if np.isinf(number):
        raise WorkerCountError(
            f"{request}: infinite. A noise scale is infinite where the gradient cannot be told from its noise. "
            "Bound it:\n"
            "    control.rescale(workers=min(noise.scale / batch_per_worker, control.most_workers))"
        )
    if number <= 0:
        raise WorkerCountError(f"{request}: there has to be a worker, one at least. To end the run:  control.stop()")
    return max(1, round(number))
