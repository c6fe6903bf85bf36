"""Keys and values in buffers of fixed size."""
