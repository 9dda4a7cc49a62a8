"""The online controller at work: several processes under Lightning, on emulated devices that change."""
