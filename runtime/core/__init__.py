"""What every operator stands on: backends, kernels and their launches, what is counted and explained."""
