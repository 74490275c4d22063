"""Detection of stuck ranks, by a thread in each rank."""
