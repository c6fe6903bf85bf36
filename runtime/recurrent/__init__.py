"""Mixers that keep a state of fixed size: a convolution's window, a recurrence."""
