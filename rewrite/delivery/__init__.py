"""The last steps that `rewrite MODEL` and `rewrite sync` share: check, verify, report."""
