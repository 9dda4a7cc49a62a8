"""Messages between processes (layer T).

``side_channel``   small collectives of the ranks among themselves
``groups``         the default process group again, among those that are left, or with who has come
``store``          a store hosted by this process

Worker and server of parameters:

``base``           what every transport offers: requests, replies, events, the two ends
``flags``          bits and numbers in requests and replies
``listener``       the server's end, one socket per worker
``peer``           ... a connection there, and the threads that move large bodies
``link``           a worker's ends: on the server's node, elsewhere
``memory``         ... the files they share on one node
``seqlock``        areas with one writer and no lock: a slot of gradients, published parameters
``sockets``        framing of messages, and the handshake
"""
