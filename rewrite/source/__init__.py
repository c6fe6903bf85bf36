"""What was there before us: modeling files, the transformers that they are in, its releases and who pins them."""
