"""Run reports: rows of metrics, trackers, warnings, kept samples."""
