"""Modeling files as trees: an index, questions to nodes, replacements."""
