"""What a call may change between two calls: the same changes are made to an original and to its package."""
