"""What a modeling file contains: classes and names, what functions compute, where values flow."""
