"""Packages that exist: made anew with your edits, checked, reviewed, undone."""
