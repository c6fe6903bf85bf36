"""One libcst transform a file; this folder is the registry."""
