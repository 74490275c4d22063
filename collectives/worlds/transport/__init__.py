"""Communication between processes: channels, operations, and repair after losses."""
