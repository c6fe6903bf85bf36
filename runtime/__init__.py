"""What rewritten modeling files import: operators, packing and backends."""
