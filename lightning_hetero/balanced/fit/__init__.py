"""One fit of the balanced engine inside Lightning: loaders, records, the policy's handle (layer L)."""
