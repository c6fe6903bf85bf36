"""What makes a folder of rewritten classes a package that loads checkpoints."""
