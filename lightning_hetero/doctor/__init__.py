"""Whether this machine and this setting will train, and what to do about what will not (layer P).

``facts``     `Facts`: what was found out, as plain values
``finding``   `Finding`: a judgement, and what to do
``machine``   checks of versions, devices, memory, processes, network
``training``  checks of the configuration, of gradients, and the verdict

What finds out is in ``cli``.
"""
