"""Transforms for a decode step: fixed addresses, fixed counts, methods for one token."""
