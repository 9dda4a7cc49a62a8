"""What `lightning-hetero-plan` says beforehand, against steps of real processes on emulated devices."""
