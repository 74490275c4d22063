"""`adaptive doctor`: what there is around a job, what is wrong with it, and what to type."""
