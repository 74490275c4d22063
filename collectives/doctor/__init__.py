"""`adaptive doctor`: examines the environment of a job, names problems and says what to type."""
