"""Measured on the machine itself (layer T).

``step_clock``  stopwatches for a rank's own work per training step, free of waiting for peers
``host_load``   processors' time and memory that others leave free
``probe``       `probe_cluster`: speeds, memory and links at start-up
``link_probe``  a link, with what will carry its messages
``timer``       time stamps on a device that is measured; what a rank can compute while it is idle
"""
