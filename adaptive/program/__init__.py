"""The program: what a user holds."""
