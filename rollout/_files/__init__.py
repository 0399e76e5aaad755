"""Files: atomic writes, folders opened without following links, trees made by others."""
