"""How fast the pipeline engine answers a change, and how long a change of plan holds training up."""
