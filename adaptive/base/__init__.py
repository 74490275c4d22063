"""What every room may know: errors, lines of the driver, the world, decisions."""
