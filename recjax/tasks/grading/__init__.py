"""From answers to rewards, in worker processes."""
