"""Random journeys: what users do around the steps of a parallel model, beside the plain module at every action."""
