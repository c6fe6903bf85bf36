"""What a captured call was made from, and whether any of it has been replaced since."""
