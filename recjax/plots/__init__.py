"""All figures."""
