"""Start a job that survives the loss of workers, and that ends with the right exit code.

    python -m collectives.mpirun -n 4 train.py --epochs 3

is `mpirun` with the same options, and what has to be said to it each time (`--help`).
"""
