"""What a run reports: rows of metrics, trackers, warnings, kept samples."""
