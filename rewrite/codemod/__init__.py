"""From a modeling file to its rewritten text."""
