"""What code computes, apart from how it is spelled."""
