"""The files of an output folder, its lock, and how a folder is put in place."""
