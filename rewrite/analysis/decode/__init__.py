"""What a layer computes for one new token."""
