"""What `forward` is asked: scenarios, caches, each argument, long rows, other dtypes."""
