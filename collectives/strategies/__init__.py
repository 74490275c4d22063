"""Strategies to synchronize the workers of a training run, such as model averaging. All have the same interface."""

from ._diloco import diloco as diloco
from ._hybrid import hybrid as hybrid
from ._islands import islands as islands
from ._local_steps import local_steps as local_steps
from ._model_averaging import model_averaging as model_averaging
from ._pair_averaging import pair_averaging as pair_averaging
from ._quorum import quorum as quorum
from ._strategy import Strategy as Strategy
from ._strategy import average as average
from ._synchronous import synchronous as synchronous
