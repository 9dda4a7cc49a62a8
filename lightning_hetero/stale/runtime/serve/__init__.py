"""The server: requests in, gradients summed, the user's optimizers stepped, answers out (layer T)."""
