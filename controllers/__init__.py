"""Controllers: what to change while training runs, and when.

`hook` hands values of the driver to a function or to a policy; they ask, and the program carries it out between steps.
"""

from adaptive._decision import Decision as Decision
from adaptive._decision import Limits as Limits
from adaptive._decision import Observation as Observation

from ._allocate import allocate as allocate
from ._allocate import allocate_curves as allocate_curves
from ._allocate import tabulated as tabulated
from ._arx import arx as arx
from ._balance import balance as balance
from ._balance import min_max as min_max
from ._batch_time import BatchTime as BatchTime
from ._control import Control as Control
from ._federated import federated as federated
from ._goodput import best_goodput as best_goodput
from ._goodput import goodput_batch as goodput_batch
from ._hook import hook as hook
from ._lb_bsp import lb_bsp as lb_bsp
from ._leader_straggler import leader_straggler as leader_straggler
from ._learning_rate import ScaleByBatchState as ScaleByBatchState
from ._learning_rate import scale_by_batch as scale_by_batch
from ._narx import narx as narx
from ._noise import efficiency as efficiency
from ._noise import efficiency_cap as efficiency_cap
from ._noise_batch import noise_batch as noise_batch
from ._policy import Policy as Policy
from ._predictors import Predictor as Predictor
from ._predictors import best_of as best_of
from ._predictors import memoryless as memoryless
from ._predictors import moving_average as moving_average
from ._proportional import proportional as proportional
from ._schedule import schedule as schedule
from ._static import cores as cores
from ._static import static_proportional as static_proportional
from ._time_model import TimeModel as TimeModel
