"""`adaptive doctor`: examines the environment of a job, and prints its problems and the commands that fix them."""
