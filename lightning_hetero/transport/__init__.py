"""Messages between processes (layer T).

``side_channel``   small collectives of the ranks among themselves
``groups``         the default process group again, among those that are left, or with who has come
``store``          a store hosted by this process

Worker and server of parameters:

``base``           what every transport offers: requests, replies, events, the two ends
``flags``          bits and numbers in requests and replies
``shared_memory``  processes of one node: mapped slots, a unix socket as doorbell
``pairs``          between nodes: one standalone torch.distributed group per worker
``merged``         several listeners as one
``seqlock``        areas with one writer and no lock: a slot of gradients, published parameters
``pulse``          signs of life, from a thread of their own
``mailbox``        events that other threads leave for the server's
``sockets``        framing of control messages on unix sockets, and who is at the other end
"""
