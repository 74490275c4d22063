"""The command `adaptive`, and how jobs are started and end. Knows neither JAX nor MPI, so it is there at once.

What a job says to its launcher (`ending.py`) is here too, for both sides.
"""
