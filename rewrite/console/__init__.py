"""What a person sees: the terminal and differences."""
