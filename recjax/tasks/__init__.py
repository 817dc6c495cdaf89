"""Prompts and rewards."""
