"""Which calls of torch are kept whole, as semantic ops with gradients of their own?"""
