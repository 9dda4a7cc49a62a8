"""What a user would pick instead: peers and our engines on the same emulated devices, in the same run."""
