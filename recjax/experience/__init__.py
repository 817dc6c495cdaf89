"""What the trainer learns from, whoever produced it."""
