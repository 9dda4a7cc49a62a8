"""The coordinator at work without hardware: discrete events, speeds, traces (layer P)."""
