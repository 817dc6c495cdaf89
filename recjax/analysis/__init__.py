"""Tables and figures from the metrics of many runs."""
