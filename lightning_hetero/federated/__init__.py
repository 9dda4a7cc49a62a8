"""Engine 4, after LB-BSP's third setting: data that stay where they are, and rare averages of what was learned on them.

``strategy``  L  the class users name
``policy``    T  what users pass to it: policies of a round
``fit``       L  one fit: own loaders, the local steps, where all ranks meet
``runtime``   T  weighted averages of parameters and optimizer states
``decide``    P  which rank makes how many steps on how many samples
"""
