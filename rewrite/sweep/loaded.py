"""Imported once by the process that all others are forked from: what every examination needs."""

from __future__ import annotations

from rewrite.verify.preload import preload

preload()
