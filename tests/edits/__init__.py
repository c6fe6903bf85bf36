"""Edits that people make in a generated file: each has to act in every way in which the model runs."""
