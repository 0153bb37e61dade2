"""What does a step with few of its equal layers say of the whole?"""
