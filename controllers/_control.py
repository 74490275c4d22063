"""`Control`, the first argument of a hook function: the current step, and the requests that a hook can make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from adaptive import AdaptiveError, BatchSizeError, DriverError, WorkerCountError
from adaptive.base.decision import Decision, Observation
from adaptive.base.split import check_shares
from adaptive.base.values.numbers import real
from adaptive.operators.hyperparameters import checked_hyperparameters

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

_NOT_FINITE = (
    "not a finite number. A noise scale is NaN until enough steps are measured, and its bounds may be infinite:\n"
    "    if np.isfinite(noise.scale):\n"
    "        control.rescale(global_batch=min(noise.scale, 4096))\n"
    "        control.rescale(workers=min(noise.scale / batch_per_worker, control.most_workers))\n"
    "or use a policy that waits and has bounds:  ctrl.hook(ctrl.noise_batch(max_batch=4096), noise)"
)


class Control:
    """The program, as a hook function sees it: Listing 1 of Mai et al. 2019.

    Requests of a hook take effect between this step and the next, on all workers at once. A later request for the same
    quantity overrides an earlier one. All attributes are read-only and replicated. A `Control` is valid until its hook
    returns: its methods raise an AdaptiveError afterwards.
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
        """Number of completed steps, including this one."""
        return self._observation.step

    @property
    def epoch(self) -> float:
        """Epochs of data consumed, as a fraction."""
        return self._observation.epoch

    @property
    def examples(self) -> int:
        """Examples consumed since the beginning, those of this step included."""
        return self._observation.examples

    @property
    def workers(self) -> int:
        """Number of members: the workers now."""
        return len(self._observation.members)

    @property
    def capacity(self) -> int:
        """Number of worker slots, the length of `batch_sizes` and of shares."""
        return len(self._observation.batch_sizes)

    @property
    def target_workers(self) -> int:
        """Requested number of members, including requests of earlier hooks and of this one."""
        seen, asked = self._observation, self._workers
        return seen.target_workers if asked is None else min(max(asked, seen.least_workers), seen.most_workers)

    @property
    def most_workers(self) -> int:
        """Largest number of members now: current members plus reserve."""
        return self._observation.most_workers

    @property
    def members(self) -> tuple[int, ...]:
        """Indices of the members."""
        return self._observation.members

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Examples per worker in this step."""
        return self._observation.batch_sizes

    @property
    def global_batch(self) -> int:
        """Global batch size of the next step, including requests of earlier hooks and of this one."""
        asked = self._global_batch
        return self._observation.global_batch if asked is None else self._observation.limits.nearest(asked)

    def barrier(self) -> None:
        """Mark a barrier, as the paper's listing does; sends nothing.

        Every worker has passed the listing's first barrier when a hook starts, because the step's message has completed
        before. Requests take effect when the next step starts, which is the second barrier.
        """
        self._check_open("barrier()")

    def rescale(
        self,
        global_batch: ArrayLike | None = None,
        shares: ArrayLike | Sequence[float] | None = None,
        workers: ArrayLike | None = None,
    ) -> None:
        """Request a global batch size, a split over the workers, a number of workers, or several of these.

        Args:
          global_batch: examples per step over all workers, rounded to an integer. The program clips it to at least one
            example per worker and at most what all workers can hold, with a note in the report.
          shares: relative weights; shape=(capacity,). Integers that sum to the global batch are used exactly. A worker
            with share 0 takes no examples until a later request gives it some; any other takes at least one.
          workers: number of members, rounded to an integer: KungFu's `rescale(n_peers)`. The program clips it to the
            available number, with a note. The members with the highest indices leave before the next step; joining
            workers prepare in the background. The global batch stays the same unless it is requested too.

        Raises:
          AdaptiveError: the hook has returned.
          BatchSizeError: no argument is given; the global batch is NaN, infinite, negative or not one number; or
            `shares` has another length than `capacity`, or is all zero.
          WorkerCountError: `workers` is not a positive number.
        """
        self._check_open("rescale()")
        if global_batch is None and shares is None and workers is None:
            self._refuse("rescale()", "none of global_batch=, shares= and workers= is given.")
        if workers is not None:
            number = self._number("workers", workers, WorkerCountError)
            if number == 0:
                why = "there must be at least one worker. To end the run:  control.stop()"
                self._refuse("rescale(workers=0)", why, WorkerCountError)
            self._workers = max(1, round(number))
        if global_batch is not None:
            self._global_batch = round(self._number("global_batch", global_batch, BatchSizeError))
        if shares is not None:
            try:
                self._shares = tuple(check_shares(shares, self.capacity).tolist())
            except BatchSizeError as error:
                self._refuse("rescale(shares=…)", str(error))

    @property
    def hyperparameters(self) -> Mapping[str, Any]:
        """Values of the driver's `ad.hyperparameter`s in the next step, by name, including requests so far."""
        return {**self._observation.hyperparameters, **self._values}

    def set_hyperparameters(self, **values: ArrayLike) -> None:
        """Set hyperparameters of the driver from the next step on, without a compilation.

        Args:
          **values: new values by name, of the same shape and dtype.

        Raises:
          AdaptiveError: the hook has returned.
          DriverError: the driver has no `ad.hyperparameter` of this name, or the value does not fit it.
        """
        self._check_open("set_hyperparameters()")
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
        """Return the hook's requests, or None; called when the hook has returned. `notes` are a policy's."""
        self._closed = True
        decision = Decision(self._global_batch, self._shares, self._stop, tuple(notes), self._workers, self._values)
        return decision if decision or decision.notes else None

    def _number(self, name: str, value: ArrayLike, error: type[AdaptiveError]) -> float:
        """Return a requested quantity as a finite number, 0 or more."""
        number = real(value)
        fields = getattr(value, "_fields", ())
        if number is None:
            kind = f"an array of shape {np.shape(value)}" if np.shape(value) and not fields else f"{value!r}"
            advice = f" Pass one of its fields: {', '.join(fields)}." if fields else ""
            self._refuse(f"rescale({name}=…)", f"it must be one number; got {kind}.{advice}", error)
        request = f"rescale({name}={number:g})"
        if not np.isfinite(number):
            self._refuse(request, _NOT_FINITE, error)
        if number < 0:
            self._refuse(request, "it cannot be negative. To end the run:  control.stop()", error)
        return number

    def _check_open(self, request: str) -> None:
        if self._closed:
            raise AdaptiveError(
                f"hook {self._name!r}{self._where}: {request} after the hook has returned. Requests are collected "
                f"while it runs, after step {self.step}; keep what you need to know, not the control."
            )

    def _refuse(self, request: str, why: str, error: type[AdaptiveError] = BatchSizeError) -> NoReturn:
        raise error(f"hook {self._name!r}{self._where}, step {self.step}: {request}: {why}")
