"""All figures and pages."""
