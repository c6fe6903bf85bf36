"""Settings of ROCm's libraries."""
