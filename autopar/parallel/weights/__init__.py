"""Where do parameters, buffers and optimizer states lie, and how do they get there and out?"""
