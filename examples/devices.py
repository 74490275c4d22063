"""The same driver in one process, over four CPU devices: `listing_1.py`, unchanged.

    python examples/devices.py --epochs 60

Each device is a worker with a batch size and kernels of its own. Compiling those takes some five seconds behind the
steps; a shorter run may end before a larger batch has its kernels. On a machine with several GPUs leave out the line
that asks for CPU devices, and `python examples/listing_1.py` does the same over them.
"""

import runpy
from pathlib import Path

import jax

jax.config.update("jax_num_cpu_devices", 4)
runpy.run_path(str(Path(__file__).with_name("listing_1.py")), run_name="__main__")
