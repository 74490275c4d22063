"""What speeds will be."""
