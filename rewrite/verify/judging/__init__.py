"""What counts as equal, how it is measured, and what a verdict is."""
