"""What a package was made from, and whether it is still so. Imports no torch."""
