"""What verifying and benchmarking share: limits, profiles, timing, shapes."""
