"""The metamorphic suite: modeling files are respelled with their meaning kept, and no site may be lost by that."""
