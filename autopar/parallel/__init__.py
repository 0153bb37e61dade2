"""What a user holds: the parallel module, its parameters, and the running of its programs."""
