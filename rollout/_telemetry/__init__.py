"""Counts and traces of what a process does."""
