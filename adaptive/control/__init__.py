"""What happens between two steps."""
