"""What goes into a step and comes out of it: modules, arguments, state, losses?"""
