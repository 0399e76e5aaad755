"""Files: atomic writes, folders opened without following links, claims, foreign trees."""
