"""Whether this machine and this setting will train, and what to do about what will not (layer P).

``facts``     `Facts`: what was found out, by concern, as plain values; `Finding`: a judgement, and what to do
``checks``    of versions, memory, processes, network, devices, the probe, the configuration, gradients, the verdict

What finds out is in ``cli``.
"""
