"""What workers publish, and others copy when they like."""
