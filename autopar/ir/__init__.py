"""What is a program: mesh, layout, plan, options, pipeline, schedule?"""
