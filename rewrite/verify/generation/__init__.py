"""`generate()`: texts, the decode loop, a checkpoint's own text, latency."""
