"""JSON: strict text, and fitting foreign values into it."""
