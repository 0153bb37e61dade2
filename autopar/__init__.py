"""autopar: a plain nn.Module, parallel on any device mesh, with the numbers of one device."""
