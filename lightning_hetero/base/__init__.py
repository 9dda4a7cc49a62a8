"""What every strategy needs from Lightning, whatever its engine (layer L).

``strategy``  `HeteroStrategy`: shared arguments, hooks, checkpoint key, what callbacks may ask
``run``       `EngineRun`: what exists only between set-up and teardown
``loaders``   copies of the train loaders, and their state in a checkpoint
``orders``    from the user's train loader to the order of an epoch
``refusals``  what an engine refuses on several devices, with its reasons
``checks``    arguments out of range, and error messages that name the cause
``setup``     registering names
``nodes``     nodes with different numbers of processes
``metrics``   what ranks with batches of different sizes reduce and gather
"""
