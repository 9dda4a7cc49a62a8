"""What every strategy needs from Lightning, whatever its engine (layer L).

``setup``    registering names, the checkpoint's key, a process's own memory, the monitor
``checks``   refusals with a reason, and error messages that name the cause
``orders``   from the user's train loader to the order of an epoch
``metrics``  means of logged values over ranks with batches of different sizes
"""
