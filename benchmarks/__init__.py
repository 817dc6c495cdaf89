"""Speed and memory."""
