"""A rank's links to its neighbours: messages, the threads that carry them, ways from device to device. Layer T."""
