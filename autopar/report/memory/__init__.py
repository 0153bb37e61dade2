"""What does a rank hold in a training step, estimated from its program, and measured?"""
