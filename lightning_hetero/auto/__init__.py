"""The engine is chosen for the user: a short measured warm-up, then the planner.

``strategy``   `AutoStrategy`: stands in the Trainer until the engine is known (layer L)
``warm_up``    what the ranks take for the user's own step, and what there is between them (layer L)
``loop``       what Lightning takes around a step (layer L)
``choice``     which engine, and why (layer P)
``second_look``  whether that is still right, by the steps trained since (layer P)
"""
