"""Messages between processes (layer T).

``side_channel``   small collectives of the ranks among themselves
``one_round``      ... in one round, where little is to be sent
``objects``        objects between ranks: the only place where what came over a process group is unpickled
``groups``         the default process group again, among those that are left, or with who has come
``run_store``      a store hosted by one process of the run, and lines to it
``roll_call``      ranks meet in a store, and a silent one is left out
``awake``          the clock of waits, and calls that may never end
``whole_files``    files that appear when they are complete
``alone``          a step of one rank, which must not wait for the others

Worker and server of parameters:

``base``           what both ends share: requests, replies, events; what a worker's end offers
``flags``          bits and numbers in requests and replies
``listener``       the server's end, one socket per worker
``peer``           ... a connection there, and the threads that move large bodies
``link``           a worker's ends: on the server's node, elsewhere
``seqlock``        areas with one writer and no lock, a slot of gradients and published parameters; their shared memory
``sockets``        framing of messages, and the handshake
"""
