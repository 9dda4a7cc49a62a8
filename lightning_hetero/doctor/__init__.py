"""Whether this machine and this setting will train, and what to do about what will not (layer P).

``facts``     `Facts`: what was found out, by concern, as plain values; `Finding`: a judgement, and what to do
``host``      checks of versions, memory, processes, network, devices
``training``  checks of the probe, the configuration, of gradients, the verdict, and all of them in order

What finds out is in ``cli``.
"""
