"""What is done with parameters and optimizer states when ranks meet (layer T).

``own``        batches of the data that a rank has for itself
``averaging``  the weighted average of tensors and optimizer states over ranks; FedProx's pull towards it
"""
