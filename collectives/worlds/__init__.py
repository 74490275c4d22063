"""The worlds: the workers of a job, and how they exchange messages (MPI, devices, jax.distributed, one worker)."""
