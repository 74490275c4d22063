"""The command `adaptive`, and the start and end of jobs. Imports neither JAX nor MPI, so commands start at once.

`ending.py` has both sides of the communication between a job's processes and their launcher.
"""
