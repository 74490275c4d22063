"""Models of step times as functions of batch sizes, and the optimal split by them."""
