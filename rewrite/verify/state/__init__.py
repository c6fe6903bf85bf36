"""What a model holds: its classes and declarations, weights, checkpoints, gradients, changes."""
