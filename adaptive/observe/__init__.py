"""What is told of steps, and to whom: events, and those who listen to them."""
