"""From the metrics of many runs to tables and figures."""
