"""The same driver in one process, over four CPU devices: `listing_1.py`, unchanged.

    python examples/devices.py --epochs 60

Each device is a worker with its own batch size and kernels. Compiling these takes about five seconds in the background;
a shorter run may end before the kernels of a larger batch are ready. On a machine with several GPUs, remove the line
that asks for CPU devices: `python examples/listing_1.py` does the same on all GPUs.
"""

import runpy
from pathlib import Path

import jax

jax.config.update("jax_num_cpu_devices", 4)
runpy.run_path(str(Path(__file__).with_name("listing_1.py")), run_name="__main__")
