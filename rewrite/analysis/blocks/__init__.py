"""What the statements of a layer's `forward` compute in a decode step, block by block."""
