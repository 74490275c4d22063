"""How the parts of a message are reduced: on devices, between processes, between hosts."""
