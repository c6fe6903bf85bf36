"""What operators know of the device: graphs, split-K semaphores, dependent launches, tiles of rows."""
