"""Which predictor and which policy the balanced engine has by default, and why."""
