"""Upgrades of packages: edits that must survive, kills, hostile input, hooks."""
