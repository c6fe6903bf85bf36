"""Options that commands share, and their values in pyproject.toml."""
