"""Command line (layer A): nothing in the package imports it.

``train``    ``lightning-hetero-train``: compose a configuration, train, write ``result.json``, print tables.
``report``   ``lightning-hetero-report``: a recorded run as one HTML file, which ``train`` writes, too; tables.
``jobs``     what makes several jobs in one process safe, each with its own ranks, and what is shown of one.
``plan``     ``lightning-hetero-plan``: what each engine would give, from `lightning_hetero.plan`.
``doctor``   ``lightning-hetero-doctor``: will it train, from `lightning_hetero.doctor`.
``machine``  what the doctor finds out: torch, GPUs, network, a module, gradients of every engine on two ranks.
``command``  how all four start: ``--version``, ``--help``, a file given as the cluster; imports no torch.
``loading``  modules and data by import path, and what they cost.
``ranks``    a short program on several ranks of this machine; one is the probe of devices and links.
"""

