"""What plans and schedules are worth, on modelled pipelines: no process, no network."""
