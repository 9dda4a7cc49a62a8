"""Messages between processes (layer T).

``side_channel``   small collectives of the ranks among themselves
``base``           worker <-> server: what every transport offers
``in_process``     threads of one process, for tests
``shared_memory``  processes of one node: mapped slots, a unix socket as doorbell
``pairs``          between nodes: one standalone torch.distributed group per worker
"""
