"""Where the operators of a layer stand in a modeling file."""
