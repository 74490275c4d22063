"""Values: arrays, pytrees, numbers, jaxprs, and the settings under which they are computed."""
