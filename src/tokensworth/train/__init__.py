"""Training: losses, the loop and its state."""
