"""The same products with weights in 8 bits."""
