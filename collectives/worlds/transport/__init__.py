"""What processes share to carry out collectives: channels, operations, repair after losses."""
