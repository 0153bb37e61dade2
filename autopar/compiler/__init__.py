"""From a captured step to the programs of all ranks."""
