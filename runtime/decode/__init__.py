"""One decode step of a model in a graph, and the prompt before it."""
