"""The program: a driver and its data, trained step by step."""
