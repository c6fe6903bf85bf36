"""The fields that a model reads from its configuration, each away from its default."""
