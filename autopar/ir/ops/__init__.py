"""What may stand in a program? Ops of our own, groups and recurrences, and what is true of each op."""
