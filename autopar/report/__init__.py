"""What the compiler did, and why."""
